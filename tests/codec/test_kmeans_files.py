"""Files of the k-means method from the command line and the Python API: records, errors and deltas."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file as save_plain

from ckptz import KMeans
from ckptz.numpy import load_file, save_file
from tests.support.cli_support import ckptz, relative_error, sets, tensors_in

Array = np.ndarray[Any, Any]


def weights(step: int = 0) -> dict[str, Array]:
    """Return a small model after some training steps: embedding, linear layer, norm and a first moment."""
    rng, drift = np.random.default_rng(0), np.random.default_rng(step)
    state = {
        "model.token.weight": rng.standard_normal((96, 64)) * 0.02,
        "model.up.weight": rng.standard_normal((64, 128)) * 0.05,
        "model.norm.weight": rng.standard_normal(64) + 1,
        "optimizer.up.weight.exp_avg": rng.standard_normal((64, 128)) * 1e-3,
    }
    return {
        n: (v * (1 + 0.02 * step * drift.standard_normal(v.shape))).astype(np.float32)
        for n, v in state.items()
    }


def write_step(folder: Path, step: int = 0, **changes: Array) -> Path:
    """Write a step as a safetensors file, with some tensors replaced by `changes`, and return its path."""
    path = folder / f"step-{step}.safetensors"
    save_plain({**weights(step), **changes}, path)
    return path


def test_only_large_weights_become_lossy_and_their_errors_are_recorded(tmp_path: Path) -> None:
    source, out = write_step(tmp_path), tmp_path / "out.ckptz"
    options = sets(levels=16, embedding_levels=32, prune=0.1, protect=0.01)
    ckptz("compress", source, "-o", out, "--method", "kmeans", *options)
    reports = tensors_in(out)
    original, restored = weights(), load_file(out)
    for name in ("model.norm.weight", "optimizer.up.weight.exp_avg"):
        assert reports[name]["lossy"] is None
        np.testing.assert_array_equal(restored[name].view(np.uint32), original[name].view(np.uint32))
    for name, levels, layer in (("model.token.weight", 32, "embedding"), ("model.up.weight", 16, "linear")):
        record, exact, lossy = reports[name]["lossy"], original[name], restored[name]
        assert (record["method"], record["promise"], record["layer_type"]) == ("kmeans", "none", layer)
        assert record["settings"]["levels"] == levels
        assert len(np.unique(lossy)) <= levels + record["n_protected"]
        assert record["max_abs_error"] == pytest.approx(np.abs(lossy - exact).max(), rel=1e-6)
        assert record["rms_error"] == pytest.approx(np.sqrt(np.mean((lossy - exact) ** 2)), rel=1e-4)
        assert record["n_pruned"] == (lossy == 0).sum() >= 0.095 * exact.size
        assert record["n_protected"] == pytest.approx(0.01 * exact.size, rel=0.3)
        is_largest = np.abs(exact) >= np.sort(np.abs(exact).ravel())[-record["n_protected"]]
        np.testing.assert_array_equal(lossy[is_largest], exact[is_largest])
        assert reports[name]["bits_per_element"] < 8
    assert "promise none" in ckptz("inspect", out, "--tensors").stdout


def test_more_levels_have_smaller_errors(tmp_path: Path) -> None:
    original, errors, name = weights(), [], "model.up.weight"
    for levels in (2, 4, 16, 64, 255):
        save_file(original, tmp_path / "a.ckptz", config=KMeans(levels=levels, protect=0.0, sigma=1.0))
        errors.append(relative_error(load_file(tmp_path / "a.ckptz")[name], original[name]))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.7
    assert errors[-1] < 0.01


def test_protected_values_may_be_bf16(tmp_path: Path) -> None:
    source = write_step(tmp_path)
    sizes = {}
    for protect_as in ("exact", "bf16"):
        out = tmp_path / f"{protect_as}.ckptz"
        ckptz("compress", source, "-o", out, "--method", "kmeans", *sets(protect=0.05, protect_as=protect_as))
        sizes[protect_as] = out.stat().st_size
        exact, restored = weights()["model.up.weight"], load_file(out)["model.up.weight"]
        is_largest = np.abs(exact) > np.quantile(np.abs(exact), 0.96)
        tolerance = 2.0**-8 if protect_as == "bf16" else 0
        np.testing.assert_allclose(restored[is_largest], exact[is_largest], rtol=tolerance)
    assert sizes["bf16"] < sizes["exact"]


def test_deltas_restore_the_same_values_as_full_files_and_are_smaller(tmp_path: Path) -> None:
    paths = [write_step(tmp_path, step) for step in range(4)]
    ckptz("compress", *paths, "--chain", "-o", tmp_path / "run", "--method", "kmeans", *sets(levels=8))
    full = tmp_path / "full.ckptz"
    for step, path in enumerate(paths):
        chained = tmp_path / "run" / f"step-{step}.ckptz"
        ckptz("compress", path, "-o", full, "--force", "--method", "kmeans", *sets(levels=8))
        restored = load_file(chained)
        for name, tensor in load_file(full).items():
            np.testing.assert_array_equal(restored[name], tensor)
        ckptz("verify", chained, "--against", path)
        if step:
            delta_bytes, full_bytes = (
                tensors_in(file)["model.up.weight"]["stored_bytes"] for file in (chained, full)
            )
            assert delta_bytes < full_bytes


@pytest.mark.parametrize("change", [1.0, np.nan, np.inf])
def test_verify_fails_if_errors_exceed_the_recorded_ones(tmp_path: Path, change: float) -> None:
    source, out = write_step(tmp_path), tmp_path / "out.ckptz"
    ckptz("compress", source, "-o", out, "--method", "kmeans")
    assert "within their recorded error;" in ckptz("verify", out, "--against", source).stdout
    changed = weights()
    changed["model.up.weight"][3, 5] += change
    save_plain(changed, source)
    run = ckptz("verify", out, "--against", source, fails=True)
    assert run.exit_code == 3
    assert "model.up.weight" in run.error
    assert "from the original; the file records" in run.error


def test_tensors_that_the_base_lacks_are_reported(tmp_path: Path) -> None:
    first = write_step(tmp_path, 0)
    changed = weights(1)
    changed["model.new.weight"] = changed.pop("model.token.weight")[:64]
    changed["model.up.weight"] = changed["model.up.weight"].T.copy()
    second = tmp_path / "second.safetensors"
    save_plain(changed, second)
    ckptz("compress", first, "--method", "kmeans")
    run = ckptz("compress", second, "--base", tmp_path / "step-0.ckptz", "--method", "kmeans")
    assert "1 tensors are not in the base" in run.stderr
    assert "1 tensors of the base are not in the input" in run.stderr
    ckptz("verify", tmp_path / "second.ckptz", "--against", second)


def test_a_plain_file_may_be_the_base(tmp_path: Path) -> None:
    first, second = write_step(tmp_path, 0), write_step(tmp_path, 1)
    run = ckptz("compress", second, "--base", first, "--method", "kmeans", "--json")
    assert run.json["files"][0]["n_lossy"] == 2
    ckptz("verify", tmp_path / "step-1.ckptz", "--against", second)


def test_roles_may_come_from_a_toml_file(tmp_path: Path) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text('[[rule]]\nname = "model.up.*"\nrole = "other"\n')
    ckptz("compress", write_step(tmp_path), "--method", "kmeans", "--set", f"input.tensor_roles={roles}")
    tensors = tensors_in(tmp_path / "step-0.ckptz")
    assert tensors["model.token.weight"]["lossy"]
    assert not tensors["model.up.weight"]["lossy"]


def test_flushing_of_subnormals_changes_no_byte(tmp_path: Path) -> None:
    source = write_step(tmp_path, **{"model.up.weight": weights()["model.up.weight"] * np.float32(1e-37)})
    files = []
    for is_flushed in (False, True):
        torch.set_flush_denormal(is_flushed)
        try:
            save_file(load_plain(source), tmp_path / "a.ckptz", config=KMeans(levels=16))
            load_file(tmp_path / "a.ckptz")
        finally:
            torch.set_flush_denormal(False)
        files.append((tmp_path / "a.ckptz").read_bytes())
        assert load_plain(source).keys() == load_file(tmp_path / "a.ckptz").keys()
    assert files[0] == files[1]


def test_protected_values_beyond_the_range_of_bf16_stay_exact(tmp_path: Path) -> None:
    tensor = weights()["model.up.weight"]
    tensor[0, 0] = np.float32(3.4e38)  # rounds to infinity in bf16
    save_file({"up.weight": tensor}, tmp_path / "a.ckptz", config=KMeans(protect=0.005, protect_as="bf16"))
    restored = load_file(tmp_path / "a.ckptz")["up.weight"]
    assert restored[0, 0] == tensor[0, 0]
    assert np.isfinite(restored).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_recorded_error_is_a_bound(tmp_path: Path, seed: int) -> None:
    tensor = np.random.default_rng(seed).standard_cauchy((64, 128)).astype(np.float32)
    save_file({"up.weight": tensor}, tmp_path / "a.ckptz", config=KMeans(levels=2 + seed % 3, protect=0.0))
    report = tensors_in(tmp_path / "a.ckptz")["up.weight"]
    restored = load_file(tmp_path / "a.ckptz")["up.weight"]
    pairs = zip(restored.flat, tensor.flat, strict=True)
    max_error = max(abs(Fraction(float(a)) - Fraction(float(b))) for a, b in pairs)
    assert max_error <= Fraction(report["lossy"]["max_abs_error"])
