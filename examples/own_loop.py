"""A training loop of your own, in plain sight: data, model, loss, optimizer.

    python examples/own_loop.py -c demo -o data.root=output/demo_data train.epochs=2

It has one process and no more than it needs: no checkpoints, no EMA, no ranks.  `ppdist train` has
them.
"""

import argparse

import paddle

from ppdist.config.experiment import load_config
from ppdist.config.train import MicroBatches
from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler
from ppdist.engine.build import build_evaluator, build_model, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-o", "--override", nargs="*", default=[])
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.override)
    paddle.set_device("cpu")

    train_set = read_split(config.data, "train", config.model.num_classes)
    batch_size = int(config.train.batch_size_per_card)
    steps_per_epoch = -(-len(train_set.records) // batch_size)
    steps = int(steps_per_epoch * config.train.epochs)
    batches = MicroBatches(total_batch=batch_size, images=batch_size, spread=False)
    sampler = TrainSampler(
        len(train_set.records), batches, rank=0, world=1, seed=config.seed,
        start_step=0, end_step=steps, sizes=[config.model.image_size],
    )  # fmt: skip
    loader = TrainLoader(train_set, config.data, sampler, seed=config.seed)

    model = build_model(config)
    criterion = loss_of(config.model).build(config.loss, model, steps_per_epoch)
    rate = paddle.optimizer.lr.CosineAnnealingDecay(config.optimizer.lr, steps)
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters(), weight_decay=0.05)

    model.train()
    for step, batch in enumerate(loader):
        criterion.prepare(model, step)
        targets = batch.boxes_BM4, batch.labels_BM, batch.mask_BM
        size = batch.images_B3HW.shape[2:]
        totals = criterion.local_normalizers(*targets, size)
        output = criterion(model(model.normalize(batch.images_B3HW)), *targets, step, totals)
        loss = output.total / paddle.clip(output.normalizer, min=1.0)  # a loss is a sum
        separate_loss = output.separate_loss
        if separate_loss is not None:
            loss = loss + separate_loss.total / paddle.clip(separate_loss.normalizer, min=1.0)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        if step % 10 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {float(loss):.3f}", flush=True)
    loader.close()

    val_set = read_split(config.data, "val", config.model.num_classes)
    metrics = build_evaluator(config, val_set, model).evaluate(model)
    print(f"mAP {metrics['mAP']:.3f}  mAP50 {metrics['mAP50']:.3f}")


if __name__ == "__main__":
    main()
