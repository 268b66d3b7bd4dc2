"""The job over Ray: the only importer of ray and ray.data.

cluster    connect to a cluster, or start one of this machine; what it has to offer
resources  what of it this job gets: device, engines, memory
preflight  what can be refused before anything is asked of a cluster
planning   the input read by Ray tasks, in order
nodes      shards on each node's own disk, seen from the driver
actor      HiddenStateExtractor: one engine, several units at once
extraction units through Ray Data, to those actors
remaining  what is left of a plan, through them; the markers' index
board      what the engines are doing, for the driver's progress lines
progress   those lines; `history`: the same over time, for the report; `metrics`: for Prometheus
stop       SIGTERM: finish what is in hand
driver     preflight -> plan -> estimate -> extract -> manifest
"""
