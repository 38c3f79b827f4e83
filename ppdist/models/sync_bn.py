"""Batch normalisation over the batches of all ranks, for gloo (Paddle has no CPU kernel for it)."""

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ppdist import dist


class _Normalize(PyLayer):
    """y = gamma * (x - mean) / sqrt(var + eps) + beta with mean and var over all ranks.

    Source of the gradient: Ioffe and Szegedy 2015, arXiv:1502.03167, section 3, with the two sums
    over the batch taken over all ranks.  Gradients of gamma and beta stay local: the gradient
    all-reduce of data parallel training averages them like every other parameter's.
    """

    @staticmethod
    def forward(ctx, x_BCHW, gamma_C, beta_C, epsilon, running_mean_C, running_var_C, momentum):
        batch, _, height, width = x_BCHW.shape
        local_count = paddle.to_tensor(float(batch * height * width))
        local_mean_C = x_BCHW.mean([0, 2, 3])
        local_square_C = ((x_BCHW - local_mean_C.reshape([1, -1, 1, 1])) ** 2).sum([0, 2, 3])
        count, mean_C, var_C = _combine(local_count, local_mean_C, local_square_C)
        inverse_C = paddle.rsqrt(var_C + epsilon)
        normal_BCHW = (x_BCHW - mean_C.reshape([1, -1, 1, 1])) * inverse_C.reshape([1, -1, 1, 1])
        ctx.save_for_backward(normal_BCHW, gamma_C, inverse_C, count)
        # Paddle on CPU keeps the biased variance (1/n) as its running statistic; so do we.
        paddle.assign(momentum * running_mean_C + (1 - momentum) * mean_C, running_mean_C)
        paddle.assign(momentum * running_var_C + (1 - momentum) * var_C, running_var_C)
        return normal_BCHW * gamma_C.reshape([1, -1, 1, 1]) + beta_C.reshape([1, -1, 1, 1])

    @staticmethod
    def backward(ctx, dy_BCHW):
        normal_BCHW, gamma_C, inverse_C, count = ctx.saved_tensor()
        dbeta_C = dy_BCHW.sum([0, 2, 3])
        dgamma_C = (dy_BCHW * normal_BCHW).sum([0, 2, 3])
        sums_2C = dist.all_reduce_sum(paddle.stack([dbeta_C, dgamma_C])) / count
        mean_dy_1C11, mean_dy_normal_1C11 = sums_2C.reshape([2, 1, -1, 1, 1])
        scale_1C11 = (gamma_C * inverse_C).reshape([1, -1, 1, 1])
        dx_BCHW = scale_1C11 * (dy_BCHW - mean_dy_1C11 - normal_BCHW * mean_dy_normal_1C11)
        return dx_BCHW, dgamma_C, dbeta_C


def _combine(
    count: paddle.Tensor, mean_C: paddle.Tensor, square_C: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Count, mean and biased variance of all ranks from each rank's count, mean and sum of squared
    deviations, in one collective.  Source: Chan, Golub and LeVeque 1979, STAN-CS-79-773, eq. 2.1.
    (Summing x and x**2 instead would lose digits where the mean is far from 0.)
    """
    counts_C = paddle.full_like(mean_C, 1.0) * count
    gathered_W3C = dist.all_gather(paddle.stack([counts_C, mean_C, square_C]))
    counts_WC, means_WC, squares_WC = gathered_W3C.unbind(1)
    total_C = counts_WC.sum(0)
    all_mean_C = (counts_WC * means_WC).sum(0) / total_C
    spread_WC = counts_WC * (means_WC - all_mean_C) ** 2
    return total_C[0], all_mean_C, (squares_WC + spread_WC).sum(0) / total_C


class GlooSyncBatchNorm2D(nn.BatchNorm2D):
    """nn.BatchNorm2D whose training statistics are those of all ranks.

    Every rank runs the same layers in the same order, so every rank reaches each collective.
    Parameters, statistics and state-dict keys are those of nn.BatchNorm2D.
    """

    def forward(self, x_BCHW: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self._use_global_stats:
            return super().forward(x_BCHW)
        return _Normalize.apply(
            x_BCHW, self.weight, self.bias, self._epsilon, self._mean, self._variance,
            self._momentum,
        )  # fmt: skip


def synchronize_batch_norm(model: nn.Layer) -> nn.Layer:
    """Makes every BatchNorm2D of a model use statistics of all ranks; returns the model.

    Those that normalise by their running statistics (frozen) stay as they are.  On GPUs Paddle's
    own SyncBatchNorm (NCCL); on gloo ranks ours.  One process: unchanged.
    """
    if dist.world_size() == 1:
        return model
    if dist.on_gpu():
        _take_paddles_own(model)
        return model
    take_gloo_batch_norm(model)
    return model


def _take_paddles_own(model: nn.Layer) -> None:
    """As nn.SyncBatchNorm.convert_sync_batchnorm, but for frozen layers, whose running statistics
    Paddle's SyncBatchNorm would take from the batches."""
    for layer in model.sublayers(include_self=True):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.BatchNorm2D) and not child._use_global_stats:
                setattr(layer, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))


def take_gloo_batch_norm(model: nn.Layer) -> None:
    """Makes every BatchNorm2D of a model ours, also on one rank."""
    for layer in model.sublayers():
        if type(layer) is nn.BatchNorm2D:
            layer.__class__ = GlooSyncBatchNorm2D  # same attributes; only forward differs
