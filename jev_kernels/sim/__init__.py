"""Kernels without a GPU, in plain Python.

    simulator    threads, warps, clusters, shared memory; launches
    ptx          the instructions of ``jev_kernels.ptx``
    barriers     mbarriers
    flags        words of device memory by which blocks wait for each other
    tma          tensor maps, boxes in and out
    wgmma        products of a warpgroup
    races        the race detector, over all of these
"""
