"""Preflight and deployment for clusters of Ascend NPUs. Nothing here needs an NPU, torch or the engine to be imported.

Two halves that meet in `environment`, `rank_table` and `visible_devices`, whose rules both use:

    preflight   evidence (commands, files, probes) -> parsers -> checks -> verdicts -> report
    deploy      cluster_file -> plan -> hosts (ssh or this machine) or manifests (Kubernetes)

Start with `verdicts`, then `evidence`, `checks_*`; or with `cluster_file`, then `plan`, `hosts`, `manifests`.
"""
