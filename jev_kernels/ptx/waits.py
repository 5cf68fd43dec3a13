"""The one form of every wait on the GPU: poll, and give up after a while. Text only; ``device`` and ``flags`` use it.

What a wait is for comes within microseconds. When it has not come after LIMIT, whoever should have brought it is lost, and
waiting on would hang the device and everybody behind it. So the wait traps: the context is lost, the next call of the
driver says so (``jev_kernels.runtime.errors.DeviceLost``), and the process ends with a sentence instead of never.

The clock is the upper half of %globaltimer, in units of 2^32 ns: one register, and read only when the first poll has failed,
so what is there already costs nothing. mbarrier.try_wait sleeps in hardware; polls of flags in device memory pause.
"""
from __future__ import annotations

TICK_SECONDS = 2 ** 32 / 1e9
LIMIT = 4                               # ticks begun after the first: 12.9 to 17.2 s, also under a sanitizer more than enough
LIMIT_SECONDS = LIMIT * TICK_SECONDS    # the most that a wait takes


def until(poll: str, pause: str = "", limit: int = LIMIT) -> str:
    """PTX that repeats ``poll`` until it has set the predicate ``ready``, and traps after ``limit`` ticks.

    poll may declare registers: it stands in braces of its own. pause: instructions between two polls. Labels and registers
    are local, so the text may be inlined any number of times.
    """
    return ("{ .reg .pred ready, late; .reg .b32 since, now;"
            f" {{ {poll} }} @ready bra DONE; mov.u32 since, %globaltimer_hi;"
            f" AGAIN: {pause} {{ {poll} }} @ready bra DONE;"
            f" mov.u32 now, %globaltimer_hi; sub.u32 now, now, since; setp.ge.u32 late, now, {limit};"
            " @!late bra AGAIN; trap; DONE: }")
