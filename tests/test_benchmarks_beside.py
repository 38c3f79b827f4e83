"""What stands beside other programs: equal layers in torch, and nothing where they are missing."""

import sys

import pytest

from benchmarks import beside_torch, beside_ultralytics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov5n", "ppyoloe_plus_s", "dfine_n", "rtdetr_r18"])
def test_layers_in_torch_give_our_outputs(name, tmp_path):
    pytest.importorskip("torch")
    report = beside_torch.measure(name, "float32", 1, 1, tmp_path / "work")
    assert report["ours"]["cpu"] > 0 and report["torch"]["cpu"] > 0


@pytest.mark.parametrize("module", [beside_torch, beside_ultralytics])
def test_a_program_that_is_not_installed_is_skipped(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    assert not module.main()
    assert capsys.readouterr().out.startswith("skipped: ")
