"""The int32 arrays that describe a forward pass to the kernels: what each holds, and where counts stand.

A forward pass runs over the rows of a token trie (see ``jev.model.row_pool``). Row-wise kernels know only how many rows are
live; the three that mix along a sequence also read an index. All arrays have a fixed capacity, so that launches depend
on capacities alone; ``counts`` says how many entries are valid, and nothing beyond them may be read.

==================  ==========  ====================================================================================
array               shape       entry
==================  ==========  ====================================================================================
``counts``          [16]        number of valid rows, tiles, chunks, runs, last rows, and of what is exchanged with the
                                prefix cache, at the indices below
``ids``             [rows]      token id
``positions``       [rows]      position of the token in its sequence
``parents``         [rows]      row of the previous token, -1 at position 0
``last_rows``       [lasts]     row of the last token of each sequence
``paths``           [entries]   per branch, the row at each position of its path; concatenated
``tiles``           [tiles, 4]  (first row, rows, first position, start of the path in ``paths``): consecutive rows of
                                one branch, at most ``TILE_ROWS``; in falling order of first position + rows
``chunk_rows``      [c, 64]     rows of the tokens at 64 absolute positions of a path, -1 where there is none
``chunk_out_rows``  [c, 64]     the same, but -1 also where an earlier branch owns the row
``chunk_slots``     [c]         slot that receives the state after this chunk, or -1
``runs``            [runs, 4]   (first chunk, chunks, slot of the state to start from or -1, 0); parents come first
``restored_pages``  [n]         page of the prefix cache for each 64 rows of history, in their order
``restored_states`` [n, 4]      (snapshot, slot that receives its state, first of three rows for the inputs of the
                                convolution, 0)
``kept_pages``      [n, 2]      (page that receives keys and values, chunk whose rows they are of)
``kept_states``     [n, 2]      (snapshot that receives the state, chunk after which it is taken)
==================  ==========  ====================================================================================

A prefix that was computed before has no rows of its own in the pool. Its keys and values stand in *history* rows behind
the bucket's, where paths point, and the row before its continuation, in ``parents``, is one that holds an input of the
convolution: see ``jev_kernels.rowwise.exchange``.
"""
ROWS, TILES, CHUNKS, RUNS, LASTS, RESTORED_PAGES, RESTORED_STATES, KEPT_PAGES, KEPT_STATES = range(9)
COUNTS = 16           # length of ``counts``: room for more without moving anything
TILE_ROWS = 128       # query rows of an attention tile
CHUNK = 64            # tokens of a gated-delta-rule chunk
TAPS = 3              # inputs of the convolution before a row's own
PADDING = 128         # rows behind the pool's last one that activations of attention have room for
