"""The `distributed` section."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppdist.common.errors import ConfigError
from ppdist.config.section import OnResume, Section

_Speed = Annotated[float, Field(gt=0)]


class DistributedConfig(Section):
    """Communication between ranks, and how they share work."""

    bucket_mb: Annotated[
        int,
        OnResume.FREE,
        BeforeValidator(lambda value: 25 if value == "auto" else value),  # of earlier versions
    ] = Field(
        default=25,
        gt=0,
        description="Gradients are all-reduced in messages of this many MiB, on GPUs while "
        "backward runs; without GPUs, where a host has several ranks, of 8 at most, between the "
        "hosts too. Raise it where a link has a long delay, lower it where memory is short.",
    )
    gradient_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="How gradients travel between ranks, for links on which steps wait "
        "(docs/distributed.md#slow-links); biases and normalisation layers always as float32. "
        "bfloat16: half the bytes, sent after backward. float16: the same with more digits, on "
        "GPUs only (gloo sums it to infinity).",
    )
    gradient_rank: int | None = Field(
        default=None,
        gt=0,
        description="Experimental, for slow links (PowerSGD, arXiv:1905.13727): gradients travel "
        "as products of two matrices of this rank, 4 for example; what these miss is kept and "
        "added to the next gradient. null: as they are.",
    )
    topk_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Experimental, for slow links (arXiv:1809.07599): of each gradient only this "
        "share of entries travels, the largest, 0.01 for example; the others are kept and added "
        "to the next gradient. It learns more slowly at first; try gradient_rank before. null: "
        "all of them.",
    )
    local_sgd_steps: int | None = Field(
        default=None,
        gt=0,
        description="Experimental, for slow links (local SGD, arXiv:1805.09767): each rank steps "
        "by its own gradient, and every so many steps weights, optimizer moments and batch-norm "
        "statistics are averaged over ranks. Evaluations, checkpoints, train.max_steps and a "
        "signal's stop wait for such a step; the EMA moves there; train.clip_norm looks at the "
        "root mean square of the ranks' own norms. null: gradients are averaged in every step.",
    )
    shares: Annotated[tuple[_Speed, ...] | None, OnResume.FREE] = Field(
        default=None,
        description="How ranks share the micro-batches of a step, or with train.sync_bn the images "
        "of each, so that slower cards get fewer; which rank takes which does not change training. "
        "[2, 2, 1]: by these relative speeds, one for each rank; the warning of a straggler has "
        "them for CPUs. null: evenly.",
    )
    shard_optimizer: Annotated[bool, OnResume.FREE] = Field(
        default=False,
        description="Each rank updates its share of the parameters and sends them to the others, "
        "so it holds 1 / ranks of the optimizer state (ZeRO stage 1, arXiv:1910.02054). The same "
        "weights bit for bit, for one more transfer of all weights per step: for a large model "
        "whose optimizer does not fit.",
    )
    timeout_seconds: Annotated[float, OnResume.FREE] = Field(
        default=1800.0,
        gt=0,
        description="How long a rank waits for the others before it ends with an error, in "
        "seconds: at an evaluation or a checkpoint (from the last progress of work that says it: "
        "the data check, an evaluation), on one host without GPUs at every sum, in NCCL "
        "(PADDLE_PG_TIMEOUT; not run on a GPU). (gloo, which sums between hosts, gives up after "
        "30 s, which cannot be configured in Paddle.) Storage that is away is waited for half as "
        "long; between hosts and within a step 15 s with gloo, else hang_seconds. Raise it where "
        "one rank has minutes of work alone (timeouts at an evaluation or the data check).",
    )
    hang_seconds: Annotated[float | None, OnResume.FREE] = Field(
        default=60.0,
        gt=0,
        description="fleetrun names a rank that makes no progress and ends the run: within a step "
        "after this many seconds, or ten times its 99th percentile if that is longer; in the first "
        "step after a start or an evaluation after ten times as many (at least 60); elsewhere "
        "after timeout_seconds. Raise it where a step rightly stalls for longer (a busy disk). "
        "null: never, to stop in a debugger.",
    )
    check_weights_every: Annotated[int, OnResume.FREE] = Field(
        default=100,
        ge=0,
        description="Every so many steps the ranks compare their weights. One whose differ from "
        "those of most is named and gets theirs; where none can tell which are right, as of two "
        "ranks, all go back to the last checkpoint. Lower it where memory or a card is suspected. "
        "0: never.",
    )

    def speeds(self, world: int) -> tuple[float, ...] | None:
        """Returns the relative speeds by which the ranks share micro-batches; None: all are equal.

        Args: world: number of ranks.
        Raises: ConfigError: `shares` does not have one entry per rank.
        """
        if self.shares is None:
            return None
        if len(self.shares) != world:
            raise ConfigError(
                f"{len(self.shares)} relative speeds, but this run has {world} ranks",
                code="shares_of_other_world",
                where="distributed.shares",
                fix="give one for each rank, in their order; null shares evenly",
            )
        return self.shares
