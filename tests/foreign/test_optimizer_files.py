"""A model and its optimizer in one file: restores, matching of moments to weights, resumed training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain
from torch import Tensor, nn

from ckptz import compress, restore
from ckptz.codec.grid import Grid
from ckptz.errors import ConfigError
from ckptz.foreign.inputs import open_input
from ckptz.guidance.optimizer_layout import Known, known_roles
from ckptz.state.roles import Rule
from ckptz.torch import load_file
from ckptz.training.files import StepState
from ckptz.training.live import Hold
from ckptz.verbs.compress import CompressReport
from tests.support.checkpointer_support import identical
from tests.support.cli_support import ckptz

Factory = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Network of two layers of the same shape, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.norm = nn.BatchNorm1d(96)
        self.mid = nn.Linear(96, 96)
        self.out = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.mid(torch.relu(self.norm(self.up(x))))))
        return result


TARGET = torch.randn(48, 96, generator=torch.Generator().manual_seed(7))


def train(net: Net, optimizer: torch.optim.Optimizer, n_steps: int, seed: int) -> list[float]:
    """Train on data that depends only on the seed; return the loss of each step."""
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(n_steps):
        x = torch.randn(64, 48, generator=generator)
        loss = (net(x) - x @ TARGET).square().mean()
        optimizer.zero_grad()
        loss.backward()  # torch's own method
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(factory: Factory, n_steps: int = 60) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = factory(net.parameters())
    train(net, optimizer, n_steps, seed=1)
    return net, optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def written(folder: Path, factory: Factory = adamw, model: str = "model.pt") -> tuple[Path, Path]:
    """Write files of a trained model and its optimizer; return their paths."""
    net, optimizer = trained(factory)
    save = save_plain if model.endswith(".safetensors") else torch.save
    save(net.state_dict(), folder / model)  # both take a state and a path
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / model, folder / "optimizer.pt"


def compressed(model: Path, optimizer: Path, out: Path, **options: Any) -> CompressReport:
    [report] = compress([model], out, optimizer=optimizer, **options)
    return report


# --- two files in one, and back -----------------------------------------------------------------


@pytest.mark.parametrize("model", ["model.pt", "model.safetensors"])
def test_both_files_are_restored_under_their_names(tmp_path: Path, model: str) -> None:
    paths = written(tmp_path, model=model)
    packed, folder = tmp_path / "state.ckptz", tmp_path / "back"
    result = ckptz("compress", paths[0], "--optimizer", paths[1], "-o", packed)
    assert result.exit_code == 0
    ckptz("restore", packed, "-o", folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in paths)
    load = load_plain if model.endswith(".safetensors") else torch.load
    assert identical(load(folder / model), load(paths[0]))
    assert identical(torch.load(folder / "optimizer.pt"), torch.load(paths[1]))
    assert ckptz("verify", packed).exit_code == 0
    names = set(load_file(packed))
    assert {"up.weight", "state.0.exp_avg"} <= names


def test_two_safetensors_files_and_a_folder_of_shards(tmp_path: Path) -> None:
    net, optimizer = trained(adamw)
    moments = {
        f"{name}.{word}": optimizer.state[parameter][word]
        for name, parameter in net.named_parameters()
        for word in ("exp_avg", "exp_avg_sq")
    }
    folder, state = tmp_path / "model", net.state_dict()
    folder.mkdir()
    for i, names in enumerate((list(state)[:4], list(state)[4:])):
        save_plain({n: state[n] for n in names}, folder / f"model-{i + 1:05d}-of-00002.safetensors")
    (folder / "config.json").write_text("{}")
    save_plain(moments, tmp_path / "moments.safetensors", metadata={"of": "AdamW"})
    report = compressed(folder, tmp_path / "moments.safetensors", tmp_path / "s.ckptz", config=Grid())
    assert not any("moments belong" in note for note in report.notes)
    (tmp_path / "config.json").write_text("{}")
    restore(tmp_path / "s.ckptz", tmp_path / "back")
    assert {p.name for p in (tmp_path / "back").iterdir()} >= {p.name for p in folder.iterdir()}
    restored = load_plain(tmp_path / "back" / "moments.safetensors")
    assert restored.keys() == moments.keys()
    assert all((restored[n] >= 0).all() for n in restored if n.endswith("_sq"))


def test_inputs_of_a_chain_keep_their_optimizer_state_in_any_order(tmp_path: Path) -> None:
    models, states = [], []
    for step in (3, 1, 2):
        models.append(tmp_path / f"step-{step}.pt")
        states.append(tmp_path / f"optimizer-{step}.pt")
        torch.save({"w": torch.full((4, 4), float(step))}, models[-1])
        torch.save({"state": {0: {"exp_avg": torch.full((4, 4), 10.0 * step)}}}, states[-1])
    reports = compress(models, tmp_path / "run", chain=True, optimizer=states)
    assert [report.step for report in reports] == [1, 2, 3]
    for report in reports:
        loaded = load_file(report.output)
        assert loaded["state.0.exp_avg"].unique().tolist() == [10 * loaded["w"][0, 0].item()]


def test_files_that_cannot_stand_together_are_refused(tmp_path: Path) -> None:
    model, optimizer = written(tmp_path, model="model.safetensors")
    (tmp_path / "other").mkdir()
    same = tmp_path / "other" / model.name
    save_plain({"x": torch.zeros(3)}, same)
    with pytest.raises(ConfigError, match=r"both are called model\.safetensors"):
        compressed(model, same, tmp_path / "a.ckptz")
    clash = tmp_path / "clash.safetensors"
    save_plain({"up.weight": torch.zeros(3)}, clash)
    with pytest.raises(ConfigError, match=r"tensor 'up.weight' is in .* too"):
        compressed(model, clash, tmp_path / "a.ckptz")
    with pytest.raises(ConfigError, match="takes a file"):
        compressed(model, tmp_path / "other", tmp_path / "a.ckptz")
    with pytest.raises(ConfigError, match="2 inputs, but 1 files of optimizer state"):
        compress([model, same], None, optimizer=optimizer)
    compress([model], tmp_path / "m.ckptz")
    with pytest.raises(ConfigError, match="restore it first"):
        compressed(tmp_path / "m.ckptz", optimizer, tmp_path / "a.ckptz")
    odd = tmp_path / "optimizer.state"
    optimizer.rename(odd)
    with pytest.raises(ConfigError, match="rename it to one of"):
        compressed(model, odd.rename(tmp_path / "optimizer.ckpt"), tmp_path / "a.ckptz")
    assert not (tmp_path / "a.ckptz").exists()


# --- matching moments to weights ----------------------------------------------------------------


def roles_of(path: Path) -> Known:
    opened = open_input(path)
    return known_roles(opened.tensors, opened.tree)


def saved_together(folder: Path, net: Net, optimizer: torch.optim.Optimizer) -> Path:
    path = folder / "training.pt"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def test_numbers_are_joined_through_the_order_of_the_model(tmp_path: Path) -> None:
    net, optimizer = trained(adamw, 3)
    roles, notes = roles_of(saved_together(tmp_path, net, optimizer))
    assert not notes
    names = [name for name, _ in net.named_parameters()]
    for i, name in enumerate(names):
        for word in ("exp_avg", "exp_avg_sq"):
            role = roles[f"optimizer.state.{i}.{word}"]
            assert (role.role, role.parameter) == (word, name)


def test_groups_in_another_order_are_joined_by_shapes_that_decide(tmp_path: Path) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        tensors = list(parameters)
        matrices = [p for p in tensors if p.ndim > 1]
        return torch.optim.AdamW([{"params": [p for p in tensors if p.ndim == 1]}, {"params": matrices}])

    net, optimizer = trained(grouped, 3)
    roles, notes = roles_of(saved_together(tmp_path, net, optimizer))
    assert not notes
    names = [n for n, p in net.named_parameters() if p.ndim == 1]
    names += [n for n, p in net.named_parameters() if p.ndim > 1]
    assert [roles[f"optimizer.state.{i}.exp_avg"].parameter for i in range(len(names))] == names


def test_names_in_the_groups_decide_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(list(net.named_parameters())[::-1], lr=1e-3)
    train(net, optimizer, 2, seed=1)
    roles, notes = roles_of(saved_together(tmp_path, net, optimizer))
    assert not notes
    last = list(dict(net.named_parameters()))[-1]
    assert roles["optimizer.state.0.exp_avg"].parameter == last


def test_moments_that_cannot_be_joined_stay_lossless_and_are_named(tmp_path: Path) -> None:
    model, optimizer = written(tmp_path, model="model.safetensors")
    report = compressed(model, optimizer, tmp_path / "s.ckptz", config=Grid())
    assert any("'state." in note and "order of the model is not known" in note for note in report.notes)
    assert any("stay lossless, first 'state." in note for note in report.notes)
    exact, restored = torch.load(optimizer)["state"], load_file(tmp_path / "s.ckptz")
    is_exact = {
        f"state.{key}.{word}": torch.equal(restored[f"state.{key}.{word}"], values[word])
        for key, values in exact.items()
        for word in ("exp_avg", "exp_avg_sq")
    }
    # Numbers 4 and 6 are matrices of one shape; the matrix of number 0 has a shape of its own.
    assert is_exact["state.4.exp_avg"]
    assert is_exact["state.6.exp_avg_sq"]
    assert not is_exact["state.0.exp_avg"]
    assert not is_exact["state.0.exp_avg_sq"]


def test_numbers_of_a_file_beside_a_torch_model_follow_its_order(tmp_path: Path) -> None:
    model, optimizer = written(tmp_path)
    joined = compressed(model, optimizer, tmp_path / "s.ckptz", config=Grid())
    assert not any("no parameter's name" in note for note in joined.notes)
    config = Grid(purpose="resume")  # as for files that contain their optimizer
    [read] = compress([model], tmp_path / "w.ckptz", moments_from=optimizer, config=config)
    assert not any("second moment" in note for note in read.notes)
    both, weights = load_file(tmp_path / "s.ckptz"), load_file(tmp_path / "w.ckptz")
    for name in ("up.weight", "mid.weight", "out.weight"):
        assert torch.equal(both[name], weights[name])


@pytest.mark.parametrize("kind", ["named", "listed"])
def test_an_average_beside_the_model_is_not_taken_for_more_of_it(tmp_path: Path, kind: str) -> None:
    net, optimizer = trained(adamw, 3)
    state = net.state_dict()
    ema: Any = {name: value.clone() for name, value in state.items()}
    if kind == "listed":
        ema = {"decay": 0.99, "shadow_params": [p.detach().clone() for p in net.parameters()]}
    torch.save({"model": state, "ema": ema, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    roles, notes = roles_of(tmp_path / "x.pt")
    assert not notes
    for i, (name, _) in enumerate(net.named_parameters()):
        role = roles[f"optimizer.state.{i}.exp_avg_sq"]
        assert (role.role, role.parameter) == ("exp_avg_sq", name)


def test_names_of_a_file_say_whose_moments_they_are(tmp_path: Path) -> None:
    model, optimizer = written(tmp_path, model="model.safetensors")
    names = [name for name, _ in Net().named_parameters()]
    listed = tmp_path / "names.txt"
    listed.write_text("\n".join(names) + "\n")
    report = compressed(model, optimizer, tmp_path / "s.ckptz", config=Grid(), param_names=listed)
    assert not any("no parameter" in note or "lossless" in note for note in report.notes)
    exact, restored = torch.load(optimizer)["state"], load_file(tmp_path / "s.ckptz")
    assert all(not torch.equal(restored[f"state.{i}.exp_avg"], exact[i]["exp_avg"]) for i in (0, 4, 6))

    for lines, message in (
        (names[:-1], r"names\.txt: has 7 names, and the optimizer numbers 8 parameters"),
        ([*names, "more"], "has 9 names, and the optimizer numbers 8"),
        ([*names[:-1], "out.scale"], r"no weight of the checkpoint is called 'out\.scale'"),
        ([names[1], names[0], *names[2:]], r"'up\.bias' has shape \[96\], and parameter 0 .*\[96, 48\]"),
        ([*names[:-1], names[0]], "names a parameter twice"),
    ):
        listed.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=message):
            compressed(model, optimizer, tmp_path / "no.ckptz", config=Grid(), param_names=listed)
    listed.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"names\.txt: not a text file in UTF-8"):
        compressed(model, optimizer, tmp_path / "no.ckptz", config=Grid(), param_names=listed)
    assert not (tmp_path / "no.ckptz").exists()


def test_a_whole_state_read_beside_a_safetensors_model_gives_the_order(tmp_path: Path) -> None:
    net, optimizer = trained(adamw)
    training_state = saved_together(tmp_path, net, optimizer)
    save_plain(net.state_dict(), tmp_path / "model.safetensors")
    [report] = compress(
        [tmp_path / "model.safetensors"],
        tmp_path / "w.ckptz",
        moments_from=training_state,
        config=Grid(purpose="resume"),
    )
    [joined] = compress([training_state], tmp_path / "s.ckptz", config=Grid())
    assert not any("second moment" in note for note in (*report.notes, *joined.notes))
    both, weights = load_file(tmp_path / "s.ckptz"), load_file(tmp_path / "w.ckptz")
    assert torch.equal(both["model.mid.weight"], weights["mid.weight"])


def test_weights_without_a_second_moment_in_the_file_that_is_read_are_named(tmp_path: Path) -> None:
    model, optimizer = written(tmp_path, model="model.safetensors")
    [report] = compress([model], tmp_path / "w.ckptz", moments_from=optimizer, config=Grid())
    assert any("optimizer.pt: holds no second moment of" in note for note in report.notes)
    (tmp_path / "twins").mkdir()
    twins = {name: torch.randn(96, 96) for name in ("a", "b")}
    save_plain(twins, tmp_path / "twins" / "model.safetensors")
    state = {i: {"exp_avg_sq": torch.rand(96, 96)} for i in range(2)}
    torch.save({"state": state, "param_groups": [{"params": [0, 1]}]}, tmp_path / "twins" / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"'state\.0\.exp_avg_sq'.*order of the model is not known"):
        compress(
            [tmp_path / "twins" / "model.safetensors"],
            None,
            moments_from=tmp_path / "twins" / "optimizer.pt",
            config=Grid(),
        )


def test_moments_of_weights_that_are_not_there_stay_lossless(tmp_path: Path) -> None:
    moment = torch.rand(96, 96)
    save_plain(
        {"model.a.weight": torch.randn(96, 96), "optimizer.b.weight.exp_avg_sq": moment},
        tmp_path / "state.safetensors",
    )
    [report] = compress([tmp_path / "state.safetensors"], None, config=Grid())
    words = "belong to no weight of the checkpoint and stay lossless, first 'optimizer.b.weight.exp_avg_sq'"
    assert any(words in note for note in report.notes)
    restored = load_file(tmp_path / "state.ckptz")
    assert torch.equal(restored["optimizer.b.weight.exp_avg_sq"], moment)
    rules = (Rule(name="optimizer.b.*", role="exp_avg_sq"),)
    [report] = compress([tmp_path / "state.safetensors"], None, config=Grid(), role_rules=rules, force=True)
    assert not any("stay lossless" in note for note in report.notes)
    assert not torch.equal(load_file(tmp_path / "state.ckptz")["optimizer.b.weight.exp_avg_sq"], moment)


def test_an_optimizer_of_another_model_is_said_and_stays_lossless(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    torch.manual_seed(0)
    other = nn.Linear(200, 300)
    optimizer = adamw(other.parameters())
    other(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "other.pt")
    report = compressed(model, tmp_path / "other.pt", tmp_path / "s.ckptz", config=Grid())
    assert any("of the model's parameters 0" in note for note in report.notes)
    assert any("stay lossless, first 'state.0" in note for note in report.notes)
    restored = load_file(tmp_path / "s.ckptz")
    assert torch.equal(restored["state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_an_unknown_optimizer_stays_lossless(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    state = {i: {"hessian": torch.rand(96, 96), "step": 3} for i in range(3)}
    groups = [{"params": [0, 1, 2], "lr": 0.1}]
    torch.save({"state": state, "param_groups": groups}, tmp_path / "odd.pt")
    report = compressed(model, tmp_path / "odd.pt", tmp_path / "s.ckptz", config=Grid())
    assert any("stay lossless" in note and "'state.0.hessian'" in note for note in report.notes)
    restore(tmp_path / "s.ckptz", tmp_path / "back")
    restored = torch.load(tmp_path / "back" / "odd.pt")
    assert all(torch.equal(restored["state"][i]["hessian"], state[i]["hessian"]) for i in range(3))


def state_of(kind: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the state that a kind of optimizer stores for one matrix."""
    first, second = torch.randn(shape) * 1e-3, torch.rand(shape) * 1e-6
    if kind == "bf16":
        return {"step": torch.tensor(9.0), "exp_avg": first.bfloat16(), "exp_avg_sq": second.bfloat16()}
    if kind == "bitsandbytes":
        codes = {f"state{i}": torch.randint(0, 256, shape, dtype=torch.uint8) for i in (1, 2)}
        scales = {f"absmax{i}": torch.rand(36) for i in (1, 2)}
        return {"step": 9, **codes, **scales, **{f"qmap{i}": torch.linspace(-1, 1, 256) for i in (1, 2)}}
    if kind == "soap":
        factors = {name: [torch.rand(n, n) for n in shape] for name in ("GG", "Q")}
        return {"step": 9, "exp_avg": first, "exp_avg_sq": second, **factors}
    if kind == "muon":
        return {"momentum_buffer": first}
    return {"step": 9, "pre_cond_0": torch.rand(shape[0], shape[0]), "inv_pre_cond_0": torch.rand(shape)}


@pytest.mark.parametrize(
    ("kind", "n_lossy"), [("bf16", 2), ("bitsandbytes", 0), ("soap", 0), ("shampoo", 0), ("muon", 1)]
)
def test_states_of_other_forms_keep_what_is_no_moment(tmp_path: Path, kind: str, n_lossy: int) -> None:
    """Weights of two matrices are lossy; of their optimizer state, only moments may be."""
    torch.manual_seed(0)
    weights = {f"{i}.weight": torch.randn(96, 96) for i in range(2)}
    state = {i: state_of(kind, (96, 96)) for i in range(2)}
    groups = [{"params": [0, 1], "lr": 1e-3}]
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "s.pt")
    [exact] = compress([tmp_path / "s.pt"], tmp_path / "exact.ckptz")
    restore(exact.output, tmp_path / "exact.pt")
    assert identical(torch.load(tmp_path / "exact.pt"), torch.load(tmp_path / "s.pt"))
    [report] = compress([tmp_path / "s.pt"], tmp_path / "lossy.ckptz", config=Grid())
    assert report.n_lossy == 2 + 2 * n_lossy
    restore(report.output, tmp_path / "lossy.pt")
    for i, restored in torch.load(tmp_path / "lossy.pt")["optimizer"]["state"].items():
        changed = {name for name, value in state[i].items() if not identical(restored[name], value)}
        assert len(changed) == n_lossy


def test_what_soap_keeps_does_not_guide_its_weights(tmp_path: Path) -> None:
    """Holds for the Checkpointer too: SOAP's second moments do not belong to elements of the weight."""
    state = {"exp_avg": torch.zeros(4, 4), "exp_avg_sq": torch.ones(4, 4), "GG": [torch.eye(4)]}
    weights = {"model": {"w": torch.zeros(4, 4)}}
    soap = {"classes": ["SOAP"], "groups": [], "optimizer": {"w": state}}
    fields = {
        "coded": {},
        "frozen": None,
        "versions": {},
        "extra_weights": (),
        "hold": Hold(),
        "was_restored": False,
    }
    assert StepState(state=weights | soap, **fields).roles["optimizer.w.exp_avg_sq"].role == "other"
    del state["GG"]
    assert StepState(state=weights | soap, **fields).roles["optimizer.w.exp_avg_sq"].role == "exp_avg_sq"


# --- resumed training ---------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Optimizer that applies the sign of an interpolated momentum, without second moments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 3e-4})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # no closure is needed here
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=group["lr"])
                momentum.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Factory] = {
    "adamw": adamw,
    "adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.5),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "lion": Lion,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_state_trains_on(tmp_path: Path, name: str) -> None:
    """With exact weights and the restored optimizer, losses stay close to those of an exact resume."""
    net, optimizer = trained(OPTIMIZERS[name])
    path = saved_together(tmp_path, net, optimizer)
    [report] = compress([path], tmp_path / "s.ckptz", config=Grid())
    assert report.n_lossy > 4
    restore(tmp_path / "s.ckptz", tmp_path / "restored.pt")
    restored = torch.load(tmp_path / "restored.pt")
    losses = []
    for state in (optimizer.state_dict(), restored["optimizer"]):
        model = Net()
        model.load_state_dict(net.state_dict())
        trained_optimizer = OPTIMIZERS[name](model.parameters())
        trained_optimizer.load_state_dict(state)
        losses.append(train(model, trained_optimizer, 20, seed=2))
        assert all(p.isfinite().all() for p in model.parameters())
    exact, resumed = (torch.tensor(part) for part in losses)
    assert torch.equal(exact[0], resumed[0])
    assert ((resumed - exact).abs() / exact).max() < 0.1
