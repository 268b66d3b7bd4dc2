"""Submit a run to a Ray cluster, follow it, and submit it again as long as it makes progress.

    client  Ray's job server over HTTP: submit once, look, follow the log, whatever the network does
    again   the loop: which end of an attempt is worth another one
    cli     the arguments of jobs/submit.py

Needs ray[default] and hydra-core on the machine that submits; neither sglang nor a GPU.
"""
