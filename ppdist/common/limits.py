"""Limits of a shell or container, too low to train under.

Without these messages they end in a traceback of whatever library met them first.
"""

import resource

from ppdist.common.errors import FILES_LIMIT, MEMORY_LIMIT, UserError, limit_met

# Paddle alone does not load in less; measured on its CPU build: 1.5 GiB fails, 2.9 GiB trains.
_LEAST_ADDRESSES = 1 << 30
LEAST_FILES = 32  # of a launcher; two ranks fail at 24 and train at 40
_MIB = 1 << 20


def require_limits(files: int = 0) -> None:
    """Refuses what could not even begin.

    Args: files: the least that must be open at once; 0: any number.
    Raises: UserError.
    """
    addresses = _limit(resource.RLIMIT_AS)
    if addresses is not None and addresses < _LEAST_ADDRESSES:
        raise _too_low(MEMORY_LIMIT)
    most = _limit(resource.RLIMIT_NOFILE)
    if most is not None and most < files:
        raise _too_low(FILES_LIMIT, files)


def allow_files(files: int) -> None:
    """Raises this process's limit on open files and connections to so many.

    Raises: UserError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < files:
        raise _too_low(FILES_LIMIT, files)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def as_limit(error: BaseException) -> BaseException:
    """A UserError if a low limit explains the error; else the error."""
    code = limit_met(error)
    if code == FILES_LIMIT or (code and _limit(resource.RLIMIT_AS) is not None):
        return _too_low(code)
    return error


def _too_low(code: str, files: int = 0) -> UserError:
    if code == FILES_LIMIT:
        enough = max(4096, files)
        return UserError(
            f"this process may have {_limit(resource.RLIMIT_NOFILE)} files and connections open at "
            f"once, and needs {files or 'more'}",
            code="open_files_limit",
            fix=f"raise the limit before the command: ulimit -n {enough} (systemd: LimitNOFILE=, "
            f"docker: --ulimit nofile={enough})",
        )
    mib = (_limit(resource.RLIMIT_AS) or 0) // _MIB
    return UserError(
        f"the address space limit of {mib} MiB is too low: Paddle reserves about 2 GiB on a CPU, "
        "and tens of GiB with cards, before it uses any of it",
        code="memory_limit",
        fix="lift the limit before the command: ulimit -v unlimited (some schedulers set it from a "
        "job's memory: h_vmem of SGE)",
    )


def _limit(kind: int) -> int | None:
    """None: there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
