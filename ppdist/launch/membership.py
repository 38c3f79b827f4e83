"""Who belongs to a job: a token that a user may give, and a name that every start draws anew.

    PPDIST_JOB_TOKEN   given by the user, the same on every host: a fleetrun without it is refused
                       when the hosts meet.  It is never sent, and the ranks never get it.
    PPDIST_JOB         made here for the ranks: those of an earlier job, or of an earlier attempt of
                       this one, have another and end when they find out (ppdist/meetings.py).

The token keeps out who does not know it.  It does not hide what is sent, nor keep out who can
change what others send (docs/security.md).
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping

TOKEN_VARIABLE = "PPDIST_JOB_TOKEN"


def proof(token: str, content: Mapping[str, object]) -> str:
    """What only who knows the token can say of this content; "" without a token.

    Args: content: what JSON can hold; order does not matter.
    """
    if not token:
        return ""
    text = json.dumps(dict(content), sort_keys=True)
    return hmac.new(os.fsencode(token), text.encode(), hashlib.sha256).hexdigest()


def proves(token: str, content: Mapping[str, object], given: str) -> bool:
    """Whether who sent the content has the same token, or as here none."""
    return hmac.compare_digest(proof(token, content).encode(), given.encode())


def name_of_job(token: str, drawn: str | None = None) -> str:
    """A name for this attempt, the same on all of its hosts.

    Args: drawn: what the first host has drawn at random; None: this host is alone and draws.
    """
    drawn = secrets.token_hex(16) if drawn is None else drawn
    return hashlib.sha256(f"{drawn} {proof(token, {'drawn': drawn})}".encode()).hexdigest()
