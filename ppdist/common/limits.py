"""Limits of a shell or container that are too low for training.

Without these checks they end in a traceback of the library that meets them first.
"""

import resource

from ppdist.common.errors import FILES_LIMIT, MEMORY_LIMIT, UserError, limit_met

# Paddle alone does not load with less; measured on its CPU build: 1.5 GiB fails, 2.9 GiB trains.
_LEAST_ADDRESSES = 1 << 30
LEAST_FILES = 32  # for a launcher; two ranks fail at 24 and train at 40
_MIB = 1 << 20


def require_limits(files: int = 0) -> None:
    """Checks that the process's limits are high enough to start the command.

    Args: files: number of files that must be open at once; 0 skips this check.
    Raises: UserError: a limit is too low.
    """
    addresses = _read_limit(resource.RLIMIT_AS)
    if addresses is not None and addresses < _LEAST_ADDRESSES:
        raise _limit_error(MEMORY_LIMIT)
    open_files = _read_limit(resource.RLIMIT_NOFILE)
    if open_files is not None and open_files < files:
        raise _limit_error(FILES_LIMIT, files)


def allow_files(files: int) -> None:
    """Raises this process's limit on open files and connections to at least `files`.

    Raises: UserError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < files:
        raise _limit_error(FILES_LIMIT, files)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def convert_limit_error(error: BaseException) -> BaseException:
    """Converts an error caused by a low limit to a UserError; returns others unchanged."""
    code = limit_met(error)
    if code == FILES_LIMIT or (code and _read_limit(resource.RLIMIT_AS) is not None):
        return _limit_error(code)
    return error


def _limit_error(code: str, files: int = 0) -> UserError:
    if code == FILES_LIMIT:
        enough = max(4096, files)
        return UserError(
            f"this process may have {_read_limit(resource.RLIMIT_NOFILE)} files and connections "
            f"open at once, and needs {files or 'more'}",
            code="open_files_limit",
            fix=f"raise the limit before the command: ulimit -n {enough} (systemd: LimitNOFILE=, "
            f"docker: --ulimit nofile={enough})",
        )
    mib = (_read_limit(resource.RLIMIT_AS) or 0) // _MIB
    return UserError(
        f"the address space limit of {mib} MiB is too low: Paddle reserves about 2 GiB on a CPU, "
        "and tens of GiB with cards, before it uses any of it",
        code="memory_limit",
        fix="lift the limit before the command: ulimit -v unlimited (some schedulers set it from a "
        "job's memory: h_vmem of SGE)",
    )


def _read_limit(kind: int) -> int | None:
    """Reads a limit of this process; None: there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
