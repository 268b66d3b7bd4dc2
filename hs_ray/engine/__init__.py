"""The SGLang engine with capture: the only package that imports sglang.

    patching   applies patches/sglang/v<release>.patch in memory, as the modules are imported
    models     how each model class gives its states, per release
    entry      carries capture into SGLang's scheduler process
    start_errors  what a scheduler raises while it starts, told to the actor
    capture    runs there: which rows of a batch are whose, and the states of all layers
    row_statistics, row_kernel  norm, largest value and sum of bits of every row, on the device
    transport  rows -> shared memory, and word of them to the actor
    ring       that shared memory: reserved by the actor, written by the scheduler
    ticket     one sample, from its submission to its states
    options    SGLang server arguments; `arguments`: the names that the installed release knows
    engine     HiddenStateEngine: token ids in, states out
    bare       SGLang as it comes: the yardstick
    janitor    outlives an engine, and removes what a kill leaves
    canary     the check before the first unit
    cpu        SGLang on a machine without a GPU

Importing this package imports none of them: `patching` must run before sglang is imported.
"""
