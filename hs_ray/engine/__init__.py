"""The SGLang engine with capture: the only package that imports sglang.

    patching   applies patches/sglang/v<release>.patch in memory, as the modules are imported
    models     how each model class gives its states, per release
    capture    runs in SGLang's scheduler process: rows of every batch -> shared memory
    ring       that shared memory: reserved by the actor, written by the scheduler
    entry      carries capture into the scheduler process
    options    SGLang server arguments, and the ones that are refused
    engine     HiddenStateEngine: token ids in, states out
    canary     the check before the first unit
    cpu        SGLang on a machine without a GPU

Importing this package imports none of them: `patching` must run before sglang is imported.
"""
