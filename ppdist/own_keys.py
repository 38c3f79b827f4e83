"""Which config keys hosts of one run may set as they like: where things lie, not what is computed.

Only the standard library: the launcher reads it before Paddle is there.
"""

HOSTS_OWN_KEYS = (
    "output_dir",  # only rank 0 writes
    "data.root",  # the data themselves are compared: feed.require_the_same
    "data.cache_dir",
    "data.workers",
    "data.worker_timeout_seconds",
    "model.pretrained",  # the content of the file is compared: preflight.flat_config
)
