"""Loss scaling of float16 where no CPU would switch it on."""

import paddle


def enable_scaling(scaler: paddle.amp.GradScaler) -> None:
    """The state that GradScaler gives itself where it believes in float16."""
    donor = {"scale": [1024.0], "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
             "decr_every_n_nan_or_inf": 1, "incr_count": 0, "decr_count": 0,
             "use_dynamic_loss_scaling": True}  # fmt: skip
    scaler._enable = True
    scaler.load_state_dict(donor)
    for name in ("_found_inf", "_temp_found_inf_value_false", "_temp_found_inf_fp16",
                 "_temp_found_inf_bf16", "_temp_found_inf_fp32"):  # fmt: skip
        setattr(scaler, name, paddle.to_tensor([False]))
    scaler._cache_found_inf = None
    scaler.update()  # makes its table of optimizers
