"""Batch norm over the images of all ranks."""

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from ppdist.distributed import collectives, paddle_api, ranks


def synchronize_batch_norm(model: nn.Layer) -> None:
    """Lets a model's BatchNorm2D layers use the statistics of all ranks."""
    if ranks.world_size() > 1:
        take_sync_batch_norm(model)


def take_sync_batch_norm(model: nn.Layer) -> None:
    """Converts every BatchNorm2D of a model to a SyncBatchNorm2D, even on one rank."""
    for layer in model.sublayers():
        if type(layer) is nn.BatchNorm2D:
            # The attributes are the same; only `forward` differs.
            layer.__class__ = SyncBatchNorm2D


class SyncBatchNorm2D(nn.BatchNorm2D):
    """nn.BatchNorm2D whose training statistics cover all images of all ranks.

    Paddle's own nn.SyncBatchNorm has no CPU kernel and weights ranks equally, whatever images each
    has (PaddlePaddle/Paddle#32464).  Every rank runs the same layers in the same order, so every
    rank reaches each collective.  Parameters, statistics and state-dict keys are those of
    nn.BatchNorm2D; a layer that normalises by its running statistics (frozen) continues to do so.

    Attributes:
        counts: False while this rank takes part only with a blank image, which must not enter the
            statistics.
    """

    counts = True

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalises [B, C, H, W] by the statistics of all ranks.  Collective in training."""
        if not self.training or paddle_api.normalises_by_running(self):
            return super().forward(x_BCHW)
        # Statistics are float32 in every precision.
        with paddle.amp.auto_cast(enable=False):
            wide_BCHW = x_BCHW if x_BCHW.dtype == paddle.float32 else x_BCHW.astype("float32")
            y_BCHW = _Normalize.apply(
                wide_BCHW, self.weight, self.bias, paddle_api.epsilon(self),
                *paddle_api.running_statistics(self), paddle_api.momentum(self), self.counts,
            )  # fmt: skip
            return y_BCHW if wide_BCHW is x_BCHW else y_BCHW.astype(x_BCHW.dtype)


class _Normalize(PyLayer):
    """Normalises by the mean and variance over all ranks that count.

        mean = sum(x) / n,  var = sum((x - mean)**2) / n
        y = gamma * (x - mean) / sqrt(var + eps) + beta

    The sums are over the n values of a channel on all ranks; a rank may have any number, including
    none.  Two all-reduces take C floats each, whatever the number of ranks.  (One for x and x**2
    would lose digits where the mean is far from 0; merging variances by ranks, Chan et al. 1979,
    eq. 2.1, needs the mean of each.)

    For a rank that does not count, y = beta: because its x is unlike that of the other ranks'
    images, it could grow from layer to layer until it is not finite.

    Source of the gradient: Ioffe and Szegedy 2015, arXiv:1502.03167, section 3, with the two sums
    over the batch taken over all ranks.  Gradients of gamma and beta stay local: the gradient
    all-reduce of data parallel training averages them like every other parameter's.
    """

    @staticmethod
    def forward(
        ctx, x_BCHW, gamma_C, beta_C, epsilon, running_mean_C, running_var_C, momentum, counts
    ):
        batch, channels, height, width = x_BCHW.shape
        count, sum_C = paddle.full([1], float(batch * height * width)), x_BCHW.sum([0, 2, 3])
        local_N = paddle.concat([count, sum_C])  # N = 1 + C
        all_N = collectives.all_reduce_sum(local_N if counts else paddle.zeros_like(local_N))
        count, sum_C = all_N.split([1, channels])
        mean_C = sum_C / count
        centred_BCHW = x_BCHW - mean_C.reshape([1, -1, 1, 1])
        if not counts:
            centred_BCHW = paddle.zeros_like(centred_BCHW)
        var_C = collectives.all_reduce_sum((centred_BCHW**2).sum([0, 2, 3])) / count
        inverse_C = paddle.rsqrt(var_C + epsilon)
        normal_BCHW = centred_BCHW * inverse_C.reshape([1, -1, 1, 1])
        ctx.counts = counts
        ctx.save_for_backward(normal_BCHW, gamma_C, inverse_C, count)
        # Paddle on CPU keeps the biased variance (1/n) as its running statistic; so do we.
        paddle.assign(momentum * running_mean_C + (1 - momentum) * mean_C, running_mean_C)
        paddle.assign(momentum * running_var_C + (1 - momentum) * var_C, running_var_C)
        return normal_BCHW * gamma_C.reshape([1, -1, 1, 1]) + beta_C.reshape([1, -1, 1, 1])

    @staticmethod
    def backward(ctx, dy_BCHW):
        normal_BCHW, gamma_C, inverse_C, count = ctx.saved_tensor()
        # A blank image may yield NaN, which the sums below would spread to all ranks.
        if not ctx.counts:
            dy_BCHW = paddle.zeros_like(dy_BCHW)
        dbeta_C = dy_BCHW.sum([0, 2, 3])
        dgamma_C = (dy_BCHW * normal_BCHW).sum([0, 2, 3])
        sums_2C = collectives.all_reduce_sum(paddle.stack([dbeta_C, dgamma_C])) / count
        if not ctx.counts:  # y does not depend on x
            return dy_BCHW, dgamma_C, dbeta_C
        mean_dy_1C11, mean_dy_normal_1C11 = sums_2C.reshape([2, 1, -1, 1, 1])
        scale_1C11 = (gamma_C * inverse_C).reshape([1, -1, 1, 1])
        dx_BCHW = scale_1C11 * (dy_BCHW - mean_dy_1C11 - normal_BCHW * mean_dy_normal_1C11)
        return dx_BCHW, dgamma_C, dbeta_C
