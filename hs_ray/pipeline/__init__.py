"""The job over Ray: the only importer of ray and ray.data.

cluster   connect to a cluster, or start one of this machine; what it has to offer
planning  the input read by Ray tasks, in order
actor     HiddenStateExtractor: one engine, several units at once
board     what the engines are doing, for the driver's progress lines
progress  those lines
history   the same over time, for the report
driver    preflight -> plan -> estimate -> extract -> manifest
"""
