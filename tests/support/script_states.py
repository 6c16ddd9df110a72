"""States that ten public training scripts pass to `torch.save`, in their own nesting, with small tensors."""

import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """A network with a tied weight, a normalisation with buffers, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.conv(self.embed(tokens).mT)).mT)
        return logits


def _trained(
    make: Callable[..., torch.optim.Optimizer], **settings: Any
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    optimizer = make(model.parameters(), **settings)
    for _ in range(2):
        tokens = torch.randint(0, 11, (2, 5))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer


def nanogpt() -> dict[str, Any]:
    """train.py of nanoGPT: compiled names, the arguments of the model, a loss that is a tensor."""
    model, optimizer = _trained(torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {"n_layer": 12, "n_head": 12, "block_size": 1024, "bias": False, "dropout": 0.0},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.284),
        "config": {"out_dir": "out", "eval_only": False, "learning_rate": 6e-4, "device": "cuda"},
    }


def trainer_optimizer() -> dict[str, Any]:
    """optimizer.pt of the Hugging Face Trainer with two groups, its scheduler and random states."""
    model, _ = _trained(torch.optim.AdamW)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
        "rng": {"python": random.Random(1).getstate(), "numpy": np.random.RandomState(1).get_state()},
        "cpu": torch.get_rng_state(),
    }


def timm() -> dict[str, Any]:
    """CheckpointSaver of timm: the arguments, an average of the weights, a metric of NumPy."""
    model, optimizer = _trained(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    return {
        "epoch": 12,
        "arch": "vit_small_patch16_224",
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": 2,
        "args": Namespace(data_dir=Path("/data/imagenet"), lr=0.1, opt_betas=None, mean=(0.485, 0.456)),
        "amp_scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 12},
        "state_dict_ema": {name: tensor * 0.999 for name, tensor in model.state_dict().items()},
        "metric": np.float64(78.125),
    }


def detectron2() -> dict[str, Any]:
    """PeriodicCheckpointer of detectron2, and its model zoo's files, whose weights are NumPy arrays."""
    model, optimizer = _trained(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)
    return {
        "model": model.state_dict(),
        "zoo": {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last_epoch": 7, "milestones": Counter({60000: 1, 80000: 1}), "gamma": 0.1},
        "iteration": 7,
        "__author__": "Detectron2 Model Zoo",
    }


def yolo() -> dict[str, Any]:
    """YOLO's last.pt with a state for its model: half precision, results as lists, a date."""
    model, optimizer = _trained(torch.optim.AdamW, amsgrad=True)
    half = OrderedDict((name, tensor.half()) for name, tensor in model.state_dict().items())
    return {
        "epoch": 99,
        "best_fitness": np.float64(0.5123),
        "model": None,
        "ema": half,
        "updates": 51200,
        "optimizer": optimizer.state_dict(),
        "train_args": {"imgsz": 640, "mosaic": 1.0, "classes": None, "names": {0: "person", 1: "bicycle"}},
        "train_metrics": {"metrics/mAP50-95(B)": 0.51, "val/box_loss": float("nan")},
        "train_results": {"epoch": [1, 2], "time": [11.5, 23.1]},
        "stride": torch.tensor([8.0, 16.0, 32.0]),
        "date": datetime(2026, 1, 2, 3, 4, 5, 678).isoformat(),
    }


def fairseq() -> dict[str, Any]:
    """checkpoint_last.pt of fairseq: a nested configuration, history of optimizers, the task's state."""
    model, optimizer = _trained(torch.optim.Adam, betas=(0.9, 0.98), eps=1e-6)
    return {
        "args": None,
        "cfg": {"common": {"seed": 1, "fp16": True}, "optimization": {"lr": [0.0005], "clip_norm": 0.0}},
        "model": model.state_dict(),
        "criterion": {},
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "MemoryEfficientFP16Optimizer",
                "lr_scheduler_state": {"best": None},
                "num_updates": 1234567890123456789,
            }
        ],
        "task_state": {"vocabulary": {b"\xff\x00", b"a"}},
        "extra_state": {
            "train_iterator": {"epoch": 3, "iterations_in_epoch": 0, "shuffle": True},
            "metrics": OrderedDict(default=[[0, "loss", "AverageMeter", {"val": 2.5, "count": -0.0}]]),
            "previous_training_time": 3600.25,
        },
        "last_optimizer_state": optimizer.state_dict(),
    }


def lightning() -> dict[str, Any]:
    """A `.ckpt` of Lightning: loops, callbacks by class name, hyper-parameters."""
    model, optimizer = _trained(torch.optim.AdamW, lr=1e-3)
    return {
        "epoch": 4,
        "global_step": 500,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict((f"net.{n}", t) for n, t in model.state_dict().items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 5}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": {
                "best_model_score": torch.tensor(0.25),
                "best_k_models": {"/run/epoch=4.ckpt": torch.tensor(0.25)},
                "dirpath": Path("/run"),
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"base_lrs": [1e-3], "_step_count": 5}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 64, "device": torch.device("cpu"), "dtype": torch.bfloat16},
    }


def diffusers() -> dict[str, Any]:
    """The training scripts of diffusers, which use accelerate: averages of weights, all random states."""
    model, optimizer = _trained(torch.optim.AdamW, weight_decay=1e-2)
    parameters = [p.detach().clone() for p in model.parameters()]
    return {
        "ema": {
            "decay": 0.9999,
            "optimization_step": 5,
            "use_ema_warmup": False,
            "shadow_params": parameters,
        },
        "unet": {name: tensor.bfloat16() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "random_states": {
            "step": 0,
            "random_state": random.Random(2).getstate(),
            "numpy_random_seed": np.random.RandomState(2).get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        },
        "lora_alphas": {"to_q": complex(0.5, 0), "to_k": frozenset({1, 2})},
    }


def ppo() -> dict[str, Any]:
    """A PPO script: running averages of observations, a buffer whose parts are views of one memory."""
    model, optimizer = _trained(torch.optim.RMSprop, centered=True, momentum=0.5)
    rollout = torch.randn(8, 4, 3)
    returns: defaultdict[str, Any] = defaultdict(list, {"train": [1.5, np.float32(2.5)]})
    return {
        "policy": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "obs_rms": {"mean": np.zeros(3), "var": np.ones(3), "count": np.int64(10_000)},
        "rollout": {"all": rollout, "observations": rollout[:, :, :2], "last": rollout[-1].T},
        "dones": np.array([True, False]),
        "returns": returns,
        "rng": np.random.default_rng(4).bit_generator.state,
        "global_step": 2**40,
    }


def torchvision() -> dict[str, Any]:
    """The reference scripts of torchvision: all parts of the state, and the arguments of the command line."""
    model, optimizer = _trained(torch.optim.SGD, lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    return {
        "model": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "epoch": 29,
        "args": Namespace(model="resnet50", device="cuda", output_dir=".", auto_augment=None, clip=1e400),
        "scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict(),
    }


STATES: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    make.__name__: make
    for make in (
        *(nanogpt, trainer_optimizer, timm, detectron2, yolo),
        *(fairseq, lightning, diffusers, ppo, torchvision),
    )
}
