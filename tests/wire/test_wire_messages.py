"""Messages of a link: sizes, quantization errors, waiting on devices, refusals, and saved state."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench.studies.paper_b.experimental  # noqa: F401 - registers ef-mixed for senders
from ckptz.errors import ConfigError, WireError
from ckptz.format.dtypes import DTYPES, dtype_of
from ckptz.kernels import wire_cpu, wire_torch
from ckptz.wire import PRESETS, RAW, LinkPolicy, Tiled, TopK, Uniform, endpoint
from ckptz.wire.endpoint import Link
from ckptz.wire.header import HEADER_BYTES, LinkHeader
from ckptz.wire.payload import BITMAP, decode_payload, encode_payload
from ckptz.wire.policy import Codec, plan_of
from ckptz.wire.state import MEMORIES, MessageKey, SampleBuffers
from tests.support import wire_reference
from tests.support.wire_support import (
    BACKWARD,
    FORWARD,
    SHAPE,
    N,
    across,
    devices,
    ends,
    f32_patterns,
    floats,
    from_torch,
    rng,
    to_torch,
    torch_end,
)

CODECS: list[Codec] = [
    *(Uniform(bits) for bits in (2, 3, 4, 6, 8)),
    *(Uniform(4, scale) for scale in ("sample", "tensor")),
    *(Uniform(bits, rans=True) for bits in (2, 8)),
    *(Tiled(4), Tiled(3.25, 16, rotate=False), Tiled(2, 256)),
    *(
        TopK(share, values, index)
        for share in (0.01, 0.1)
        for values in (8, 16)
        for index in ("bitmap", "rice")
    ),
]
MILLION = 1 << 20
F32, ONES, NORMAL = dtype_of("F32"), f32_patterns(np.ones(N)), f32_patterns(rng().standard_normal(N))


FEEDBACKS = (None, "ef", "ef21", "aqsgd", "ef-mixed")  # the last one is sent only by bench/studies/paper_b
COMMON = [("F32", None), ("BF16", "ef21"), ("F16", None)]
RARE = [
    (dtype, kind) for dtype in ("F32", "BF16", "F16") for kind in FEEDBACKS if (dtype, kind) not in COMMON
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "feedback"), [*COMMON, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in RARE)]
)
def test_every_end_computes_the_same_bytes_and_values(codec: Codec, dtype: str, feedback: Any) -> None:
    if feedback == "ef-mixed" and not isinstance(codec, TopK):
        pytest.skip("ef-mixed needs TopK")
    index = CODECS.index(codec)
    policy = LinkPolicy(
        forward=codec,
        backward=codec,
        feedback=feedback,
        warmup_steps=index % 2,
        reuse=isinstance(codec, TopK) and feedback != "ef-mixed" and index % 3 == 0,
        rounding="stochastic" if index % 2 else "nearest",
    )
    pair, simulator = ends(policy), Link(0, 1, policy)
    torch_pairs = [(torch_end(policy, d), torch_end(policy, d), d) for d in devices()]
    for step in range(4):
        key = MessageKey(step, 0, 0, np.arange(5) + 5 * (step % 2))
        for back in (False, True):
            direction = BACKWARD if back else FORWARD
            patterns = f32_patterns(rng(step + 9 * back).standard_normal(N) * 1e-3, dtype)
            if step == 3:
                patterns[7] = f32_patterns([np.inf], dtype)[0]
            message, received = across(pair, patterns, key, back=back, dtype=dtype)
            assert len(message) <= simulator.message_cap(direction, dtype_of(dtype), SHAPE, key)
            simulated = simulator.simulate(direction, patterns, dtype_of(dtype), SHAPE, key)
            assert np.array_equal(simulated, received)
            assert np.isfinite(floats(received, dtype)).all() == (step != 3)
            for src, dst, device in torch_pairs:
                src, dst = (dst, src) if back else (src, dst)
                sent = src.send(direction, to_torch(patterns, device), dtype_of(dtype), SHAPE, key)
                assert np.array_equal(sent.message.cpu().numpy(), message)
                received_by_torch = dst.receive(direction, sent.message, dtype_of(dtype), SHAPE, key)
                assert np.array_equal(from_torch(received_by_torch, patterns.dtype), received)


# --- sizes and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "back", "limit"),
    [
        (LinkPolicy(forward=Uniform(8)), False, 1.02),
        (LinkPolicy(forward=Uniform(4)), False, 0.52),
        (LinkPolicy(forward=TopK(0.1, 8, "bitmap")), False, 0.23),
        (LinkPolicy(forward=Tiled(3.9375, 64)), False, 0.508),
        (PRESETS["paper_top10"], True, 0.11),
    ],
)
def test_bytes_per_element_of_a_million_floats(policy: LinkPolicy, back: bool, limit: float) -> None:
    link, shape = Link(0, 1, policy), (16, MILLION // 16)
    patterns = f32_patterns(rng().standard_normal(MILLION))
    message = link.send(FORWARD, patterns, F32, shape, MessageKey(0)).message
    if back:
        message = link.send(BACKWARD, patterns, F32, shape, MessageKey(0)).message
    assert len(message) / MILLION <= limit
    plan = policy.plan(BACKWARD if back else FORWARD, F32, shape)
    assert len(message) == plan.cap


@pytest.mark.parametrize("share", [0.03, 0.02, 0.01, 0.003, 0.0005])
def test_rice_gaps_are_within_three_percent_of_the_bound(share: float) -> None:
    plan = plan_of(TopK(share, 8, "rice"), F32, (1, MILLION))
    values = f32_patterns(rng().standard_normal(MILLION))
    frame = encode_payload(wire_cpu, plan, values)
    n_bits = 8 * sum(len(part) for part in frame.parts[:-2])
    bound = math.lgamma(MILLION + 1) - math.lgamma(plan.k + 1) - math.lgamma(MILLION - plan.k + 1)
    assert frame.mode != BITMAP
    assert n_bits <= 1.03 * bound / math.log(2)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_relative_error_does_not_depend_on_the_magnitude(bits: int) -> None:
    plan, errors = plan_of(Uniform(bits), F32, (MILLION // 8,)), []
    values = rng().standard_normal(MILLION // 8)
    for exponent in range(-12, 7):
        exact = (values * 10.0**exponent).astype(np.float32)
        decoded = encode_payload(wire_cpu, plan, exact.view(np.uint32)).decoded().view(np.float32)
        errors.append(np.linalg.norm((decoded - exact).astype(float)) / np.linalg.norm(exact.astype(float)))
    assert max(errors) < 1.02 * min(errors)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"F4", "F6_E2M3", "F6_E3M2", "C64"}))
def test_integers_and_small_tensors_pass_unchanged(dtype: str) -> None:
    policy = LinkPolicy(forward=Uniform(2), backward=TopK(0.01), feedback="ef21")
    size = DTYPES[dtype].pattern_bytes
    for shape in ((3, 100),) if dtype in ("F32", "BF16", "F16") else ((3, 100), (70, 100)):
        patterns = rng().integers(0, 256, math.prod(shape) * size).astype(np.uint8).view(f"<u{size}")
        pair = ends(policy)
        _, received = across(pair, patterns, MessageKey(0), dtype=dtype, shape=shape)
        assert np.array_equal(patterns, received)


def test_fixed_messages_have_the_size_of_message_cap() -> None:
    policy = LinkPolicy(forward=TopK(0.01, index="rice"), backward=Uniform(2, rans=True), warmup_steps=1)
    pair = ends(policy, fixed=True)
    for step in range(2):
        for back in (False, True):
            direction, key = BACKWARD if back else FORWARD, MessageKey(step)
            size = pair[1].message_cap(direction, F32, SHAPE, key)
            message, _ = across(pair, f32_patterns(rng().standard_normal(N) ** 5), key, back=back)
            assert len(message) == size
    assert size < policy.plan(BACKWARD, F32, SHAPE, raw=True).cap


def test_rans_makes_messages_of_skewed_codes_shorter() -> None:
    patterns = f32_patterns(rng().standard_normal(N) ** 7)
    sizes = [
        len(across(ends(LinkPolicy(forward=c)), patterns, MessageKey(0))[0])
        for c in (Uniform(4), Uniform(4, rans=True))
    ]
    assert sizes[1] < 0.6 * sizes[0]


def error_of(codec: Codec, values: Any) -> float:
    """Return the root mean square error of a codec for float32 [rows, columns]."""
    plan = plan_of(codec, F32, values.shape)
    assert plan.codec == codec
    decoded = encode_payload(wire_cpu, plan, values.reshape(-1).view(np.uint32)).decoded().view(np.float32)
    return float(np.sqrt(np.mean((decoded.reshape(values.shape) - values) ** 2)))


def test_rows_that_spread_wider_get_more_bits_within_the_budget() -> None:
    values = rng().standard_normal((64, 256)) * 2.0 ** (np.arange(64) % 4)[:, None]
    plan = plan_of(Tiled(4, 64), F32, values.shape)
    frame = encode_payload(wire_cpu, plan, f32_patterns(values))
    widths = wire_cpu.unpack(frame.parts[1], 4, 64)
    assert widths.sum() == 4 * 64
    assert all(widths[i::4].mean() < widths[i + 1 :: 4].mean() - 0.8 for i in range(3))
    equal = encode_payload(wire_cpu, plan, f32_patterns(np.ones((64, 256))))
    assert set(wire_cpu.unpack(equal.parts[1], 4, 64).tolist()) == {4}


def test_a_rotation_spreads_outliers_and_is_undone() -> None:
    values = rng().standard_normal((64, 256)).astype(np.float32)
    values[::3, 17] = 60
    assert error_of(Tiled(4, 64), values) < 0.7 * error_of(Tiled(4, 64, rotate=False), values)
    assert error_of(Tiled(8, 256), values) < 0.05


def test_tiles_err_less_than_blocks_of_equal_bytes_where_rows_differ() -> None:
    values = rng().standard_normal((256, 128)) * np.exp(rng(1).standard_normal((256, 1)))
    values = values.astype(np.float32)
    sizes = [plan_of(c, F32, values.shape).cap for c in (Tiled(3.9375), Uniform(4))]
    assert sizes[0] <= sizes[1] + 256 // 2
    assert error_of(Tiled(3.9375), values) < 0.7 * error_of(Uniform(4), values)


# --- ends that never wait for a device ----------------------------------------------------------

ASYNC_POLICIES = [
    LinkPolicy(forward=RAW, backward=RAW),
    LinkPolicy(forward=Uniform(4, rans=True), backward=Uniform(3), feedback="ef21"),
    LinkPolicy(forward=TopK(0.01), backward=TopK(0.01, 16), reuse=True),
    LinkPolicy(forward=Tiled(3.5), backward=Tiled(2, 16), rounding="stochastic", feedback="ef"),
]


class NoSynchronization(TorchDispatchMode):
    """Fails if the host waits for a number from the device, or for a size that depends on data."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select")
        return function(*args, **(kwargs or {}))


def async_ends(policy: LinkPolicy, kernels: Any = wire_torch, device: str = "cpu") -> list[Link]:
    like = torch.zeros(0, dtype=torch.uint8, device=device)
    options: dict[str, Any] = {"kernels": kernels, "like": like}
    return [Link(0, 1, policy, fixed=True, verify="step", **options) for _ in range(2)]


def fail_to_synchronize(*_: Any) -> None:
    raise AssertionError("the host waits for the device")


@pytest.mark.parametrize("policy", ASYNC_POLICIES, ids=str)
def test_messages_on_a_device_never_wait_and_equal_those_of_the_host(
    policy: LinkPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices()[-1]
    first, second = async_ends(policy, wire_torch, device)
    other = Link(0, 1, policy, fixed=True)
    monkeypatch.setattr(wire_torch, "host_bytes", fail_to_synchronize)
    for step in range(3):
        for direction, src, dst in ((FORWARD, first, second), (BACKWARD, second, first)):
            patterns = f32_patterns(rng(step + 7 * direction).standard_normal(N))
            patterns[9] = f32_patterns([np.inf if step == 1 else 1])[0]
            live = to_torch(patterns, device)
            with NoSynchronization():
                message = src.send(direction, live, F32, SHAPE, MessageKey(step)).message
                received = dst.receive(direction, message, F32, SHAPE, MessageKey(step))
            sent = other.send(direction, patterns, F32, SHAPE, MessageKey(step))
            assert np.array_equal(message.cpu().numpy(), sent.message)
            assert np.array_equal(from_torch(received, np.uint32), sent.decode())
    first.check()
    second.check()


@pytest.mark.parametrize("policy", ASYNC_POLICIES, ids=str)
@pytest.mark.parametrize("position", [7, 17, 50, 60, 64, 700])
def test_a_damaged_message_arrives_as_nan_and_is_named_by_the_check(
    policy: LinkPolicy, position: int
) -> None:
    first, second = async_ends(policy)
    patterns = to_torch(NORMAL)
    message = first.send(FORWARD, patterns, F32, SHAPE, MessageKey(0, 2)).message
    message[position] ^= 64
    received = second.receive(FORWARD, message, F32, SHAPE, MessageKey(0, 2))
    assert np.isnan(floats(from_torch(received, np.uint32))).all()
    where = "link 0->1 forward, step 0, microbatch 2, tensor 0"
    with pytest.raises(WireError, match=f"^{where}: (.*checksum|header)"):
        second.check()
    second.check()
    if policy.feedback == "ef21":
        assert not second.state_dict()["wire/0-1/forward/0/2/rx/state"].any()


def test_a_damaged_message_arrives_as_nan_beyond_the_pending_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "MAX_PENDING_CHECKS", 0)
    first, second = async_ends(LinkPolicy(forward=Uniform(8)))
    for step in range(2):
        message = first.send(FORWARD, to_torch(NORMAL), F32, SHAPE, MessageKey(step)).message
        message[700] ^= 64 * step
        received = second.receive(FORWARD, message, F32, SHAPE, MessageKey(step))
    assert np.isnan(floats(from_torch(received, np.uint32))).all()


# --- refused messages ---------------------------------------------------------------------------

Q8 = LinkPolicy(forward=Uniform(8), backward=TopK(0.1))
KEY = MessageKey(3, 2, 1)


def sent_q8(key: MessageKey = KEY, **changes: Any) -> Any:
    link = Link(changes.pop("src", 0), changes.pop("dst", 1), changes.pop("policy", Q8))
    return link.send(FORWARD, NORMAL, F32, SHAPE, key).message


def flags_of(message: Any) -> int:
    return LinkHeader.parse(message[:HEADER_BYTES].tobytes()).flags


def with_header(message: Any, **fields: int) -> Any:
    """Change fields of a message's header, and update its checksum."""
    header = dataclasses.replace(LinkHeader.parse(message[:HEADER_BYTES].tobytes()), **fields)
    return np.concatenate([np.frombuffer(header.pack(), np.uint8), message[HEADER_BYTES:]])


def with_version_2(message: Any) -> Any:
    head = bytearray(message[:56].tobytes())
    head[2] = 2
    checksum = wire_reference.checksum(np.frombuffer(head, np.uint8).copy())
    return np.frombuffer(bytes(head) + checksum.to_bytes(8, "little"), np.uint8)


def flipped_at(message: Any, position: int) -> Any:
    changed = message.copy()
    changed[position] ^= 8
    return changed


GRADIENT = Link(0, 1, LinkPolicy(backward=Uniform(8))).send(BACKWARD, ONES, F32, SHAPE, KEY).message
Q8_MESSAGE = sent_q8()
# Messages that an end refuses before it allocates memory, and words of the WireError.
MESSAGES: list[tuple[Any, str]] = [
    (sent_q8(MessageKey(2, 2, 1)), ": step: "),
    (sent_q8(MessageKey(3, 1, 1)), ": microbatch: "),
    (sent_q8(MessageKey(3, 2, 0)), ": tensor: "),
    (sent_q8(MessageKey(3, 2, 1, is_eval=True)), ": flags: "),
    (sent_q8(MessageKey(3, 2, 1, np.arange(5))), ": batch: "),
    (sent_q8(src=1), ": src: "),
    (sent_q8(dst=2), ": dst: "),
    (sent_q8(policy=LinkPolicy(forward=Uniform(4))), ": param: "),
    (sent_q8(policy=LinkPolicy(forward=TopK(0.1))), ": codec: "),
    (sent_q8(policy=dataclasses.replace(Q8, seed=1)), ": plan: "),
    (GRADIENT, ": flags: "),
    (with_header(Q8_MESSAGE, payload_bytes=0xFFFFFFF0), "payload_bytes: 4294967280 bytes"),
    (with_header(Q8_MESSAGE, n=0xFFFFFFFF), ": n: "),
    (with_header(Q8_MESSAGE, flags=flags_of(Q8_MESSAGE) | 8), ": flags: "),
    (with_header(Q8_MESSAGE, count=0xFFFFFFFF), ": count: "),
    (with_header(Q8_MESSAGE, payload_bytes=len(Q8_MESSAGE) - HEADER_BYTES - 16), "payload checksum"),
    (with_version_2(Q8_MESSAGE), "version 2 is unknown; upgrade"),
    *((Q8_MESSAGE[:n], "header|payload") for n in (0, 1, 63, 64, 100, len(Q8_MESSAGE) - 1)),
    *(
        (flipped_at(Q8_MESSAGE, at), "header|magic|checksum")
        for at in (0, 2, 5, 17, 63, 64, 1000, len(Q8_MESSAGE) - 1)
    ),
]


def test_the_refusal_of_a_message_names_link_and_key() -> None:
    for message, words in MESSAGES:
        with pytest.raises(WireError, match=words) as caught:
            Link(0, 1, Q8).receive(FORWARD, message, F32, SHAPE, KEY)
        assert str(caught.value).startswith("link 0->1 forward, step 3, microbatch 2, tensor 1: ")
        assert "\n" not in str(caught.value)


# --- refused calls --------------------------------------------------------------------------------

TWICE, WIDER = f32_patterns(np.ones(2 * N)), (10, 1111)
IDS = MessageKey(0, 0, 0, np.arange(5))


def ends_after(policy: LinkPolicy, *keys: MessageKey) -> tuple[Link, Link]:
    """Build two ends, and send a message for each key from the first to the second."""
    pair = ends(policy)
    for key in keys:
        across(pair, ONES, key)
    return pair


def send(link: Link, key: MessageKey, *, back: bool = False) -> None:
    link.send(BACKWARD if back else FORWARD, ONES, F32, SHAPE, key)


def repeat_a_message() -> None:
    pair, key = ends(Q8), MessageKey(0)
    message, _ = across(pair, ONES, key)
    pair[1].receive(FORWARD, message, F32, SHAPE, key)


def send_samples_of_another_size() -> None:
    link = Link(0, 1, AQSGD, same_shape=False)
    send(link, IDS)
    link.send(FORWARD, TWICE, F32, (5, 2222), IDS)


def load(change: Any) -> None:
    policy = LinkPolicy(forward=TopK(0.1), feedback="ef21")
    Link(0, 1, policy).load_state_dict(change(ends_after(policy, MessageKey(0))[0].state_dict()))


AQSGD = LinkPolicy(forward=TopK(0.1), feedback="aqsgd")
REUSE = PRESETS["paper_top10"]
STATE = "wire/0-1/forward/0/0/tx/state"
Refused = type[ConfigError] | type[WireError]
CALLS: list[tuple[Any, Refused, str]] = [
    (lambda: Link(0, 1, LinkPolicy(), verify="step"), ConfigError, "verify='step' needs"),
    (lambda: Link(0, 1, AQSGD, fixed=True, verify="step"), ConfigError, "verify='step' needs"),
    (repeat_a_message, WireError, "state_seq"),
    (
        lambda: ends_after(Q8, MessageKey(0))[0].send(FORWARD, TWICE, F32, WIDER, MessageKey(1)),
        WireError,
        r"step 1.*shape: F32 \[10, 1111\] after F32 \[5, 1111\]",
    ),
    (
        lambda: ends_after(Q8, MessageKey(0))[1].receive(
            FORWARD, Q8_MESSAGE, dtype_of("BF16"), SHAPE, MessageKey(1)
        ),
        WireError,
        "shape",
    ),
    (
        lambda: send(ends_after(REUSE, MessageKey(1))[1], MessageKey(0), back=True),
        WireError,
        "positions: no activation of this microbatch",
    ),
    (
        lambda: send(Link(0, 1, REUSE), MessageKey(0), back=True),
        WireError,
        "positions: no activation of this microbatch",
    ),
    *(
        (
            lambda patterns=patterns: Link(0, 1, Q8).send(FORWARD, patterns, F32, SHAPE, MessageKey(0)),
            ConfigError,
            r"patterns of \d+ bytes are not a tensor of F32 \[5, 1111\]",
        )
        for patterns in (np.zeros(N - 1, np.uint32), np.zeros(N, np.uint16))
    ),
    (send_samples_of_another_size, WireError, "samples: 2222 elements each, but earlier ones had 1111"),
    (lambda: send(Link(0, 1, AQSGD), MessageKey(0)), ConfigError, "ids of 5 samples"),
    (lambda: SampleBuffers(8, Path("unused")), ConfigError, "n_samples"),
    (lambda: load(lambda s: {n: a for n, a in s.items() if n != STATE}), WireError, f"lacks {STATE}"),
    (
        lambda: load(lambda s: s | {"wire/0-1/sideways/0/0/tx/seq": s[STATE]}),
        WireError,
        "unknown entry",
    ),
    (lambda: Uniform(5), ConfigError, "."),
    (lambda: Uniform(4, "row"), ConfigError, "."),
    (lambda: TopK(0), ConfigError, "."),
    (lambda: TopK(0.1, 4), ConfigError, "."),
    *((lambda values=values: Tiled(*values), ConfigError, ".") for values in ((1.5,), (3.3,), (4, 32))),
    (lambda: LinkPolicy(forward=RAW, backward=TopK(0.1), reuse=True), ConfigError, "."),
    (lambda: LinkPolicy(feedback=(None, "aqsgd")), ConfigError, "."),
    (lambda: LinkPolicy(feedback="ef22"), ConfigError, "."),
    (lambda: LinkPolicy(min_elements=0), ConfigError, "min_elements"),
    (lambda: Link(0, 1, "fast"), ConfigError, "."),
    (lambda: plan_of(RAW, F32, (1 << 31,)), ConfigError, "."),
    (lambda: LinkPolicy.from_json("{}"), ConfigError, "."),
    (lambda: LinkPolicy.from_json("no"), ConfigError, "."),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=map(str, range(len(CALLS))))
def test_an_invalid_call_of_a_link_is_refused(call: Any, error: Refused, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("kernels", [wire_cpu, wire_reference, wire_torch], ids=["cpu", "numpy", "torch"])
@pytest.mark.parametrize("shape", [(8, 4096), (8192,), (2, 4096), (4, 1 << 20)])
def test_a_gradient_of_another_shape_than_its_activation_is_refused_at_both_ends(
    kernels: Any, shape: tuple[int, ...]
) -> None:
    like = torch.zeros(0, dtype=torch.uint8) if kernels is wire_torch else None
    options: dict[str, Any] = {"kernels": kernels, "like": like, "same_shape": False}
    first, second, matching = (Link(0, 1, PRESETS["paper_top10"], **options) for _ in range(3))
    patterns, gradient = (kernels.zeros(math.prod(s), 4, like) for s in ((8, 1024), shape))
    activation = first.send(FORWARD, patterns, F32, (8, 1024), MessageKey(0)).message
    second.receive(FORWARD, activation, F32, (8, 1024), MessageKey(0))
    with pytest.raises(WireError, match=r"positions: the gradient has shape \["):
        second.send(BACKWARD, gradient, F32, shape, MessageKey(0))
    matching.send(FORWARD, gradient, F32, shape, MessageKey(0))
    message = matching.send(BACKWARD, gradient, F32, shape, MessageKey(0)).message
    with pytest.raises(WireError, match=r"the activation \[8, 1024\]"):
        first.receive(BACKWARD, message, F32, shape, MessageKey(0))


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, TopK)] + [Uniform(4)], ids=str)
def test_a_payload_followed_by_more_bytes_is_refused(codec: Codec) -> None:
    plan = plan_of(codec, F32, SHAPE)
    frame = encode_payload(wire_cpu, plan, NORMAL)
    longer = wire_cpu.concat([*frame.parts, np.zeros(16, np.uint8)])
    with pytest.raises(ValueError, match="16 bytes follow its end"):
        decode_payload(wire_cpu, plan, longer, frame.mode, False)


# --- state --------------------------------------------------------------------------------------


SLOT, SAMPLES = "wire/0-1/forward/0/0/tx", "wire/0-1/forward/0/samples/tx"
INVALID_STATES: list[tuple[Any, str, Any, str]] = [
    ("ef21", f"{SLOT}/state", lambda a: a[:1], "holds a state uint32"),
    ("ef21", f"{SLOT}/state", lambda a: a.astype(np.float64), "holds a state float64"),
    ("ef21", f"{SLOT}/seq", lambda a: a[:, None], "not a counter and a shape"),
    ("ef21", f"{SLOT}/seq", lambda a: -a, "not a counter and a shape"),
    ("aqsgd", f"{SAMPLES}/rows", lambda a: a[:-1], "holds ids"),
    ("aqsgd", f"{SAMPLES}/rows", lambda a: a.astype(np.uint64), "not F32 patterns"),
    ("aqsgd", f"{SAMPLES}/ids", lambda a: a.astype(np.float64), "holds ids"),
]


@pytest.mark.parametrize(("feedback", "name", "change", "words"), INVALID_STATES)
def test_an_invalid_state_is_refused(feedback: Any, name: str, change: Any, words: str) -> None:
    policy = LinkPolicy(forward=TopK(0.1), feedback=feedback)
    pair = ends(policy)
    across(pair, ONES, MessageKey(0, 0, 0, np.arange(5)))
    state = pair[0].state_dict()
    with pytest.raises(WireError, match=words):
        Link(0, 1, policy).load_state_dict(state | {name: change(state[name])})


def test_the_level_in_a_state_of_an_older_version_is_ignored() -> None:
    link = Link(0, 1, LinkPolicy(forward=Uniform(8)))
    link.load_state_dict({"wire/0-1/forward/0/level": np.zeros(4)})
    assert link.state_dict() == {}


def test_ef_mixed_is_sent_only_if_the_study_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MEMORIES, "ef-mixed")
    sender, receiver = ends(LinkPolicy(forward=TopK(0.1), feedback="ef-mixed"))
    with pytest.raises(ConfigError, match="ef-mixed can only be received"):
        sender.send(FORWARD, ONES, F32, SHAPE, MessageKey(0))
    monkeypatch.setitem(MEMORIES, "ef-mixed", MEMORIES["ef"])
    message = sender.send(FORWARD, ONES, F32, SHAPE, MessageKey(0)).message
    monkeypatch.delitem(MEMORIES, "ef-mixed")
    assert (receiver.receive(FORWARD, message, F32, SHAPE, MessageKey(0)) != 0).sum() == 5 * 111


def test_ef21_converges_to_a_constant_tensor() -> None:
    pair = ends(LinkPolicy(forward=TopK(0.2), feedback="ef21"))
    errors = [np.abs(floats(across(pair, NORMAL, MessageKey(i))[1]) - floats(NORMAL)).max() for i in range(8)]
    assert errors[-1] < 0.01 < errors[0]


def test_the_mean_of_messages_with_ef_converges_to_the_tensor() -> None:
    pair, n_steps = ends(LinkPolicy(forward=TopK(0.1), feedback="ef")), 200
    total = sum(floats(across(pair, NORMAL, MessageKey(i))[1]).astype(float) for i in range(n_steps))
    assert np.abs(total / n_steps - floats(NORMAL)).max() < 0.15


def test_mixed_feedback_divides_the_budget_between_values_and_errors() -> None:
    pair = ends(LinkPolicy(forward=TopK(0.1, 16), feedback="ef-mixed"))
    x = NORMAL
    _, first = across(pair, x, MessageKey(0))
    error = pair[0].state_dict()["wire/0-1/forward/0/0/tx/state"]
    _, second = across(pair, x, MessageKey(1))
    k = 111
    assert (floats(first).reshape(SHAPE) != 0).sum() == 5 * k
    is_sent = floats(second).reshape(SHAPE) != 0
    by_error = np.argsort(-np.abs(floats(error).reshape(SHAPE)), axis=1, kind="stable")[:, : k // 2]
    assert np.take_along_axis(is_sent, by_error, axis=1).all()
    assert (is_sent.sum(axis=1) == k).all()


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef-mixed", "aqsgd"])
def test_a_resumed_link_continues_bit_for_bit(feedback: Any, tmp_path: Path) -> None:
    policy = LinkPolicy(forward=TopK(0.1), backward=TopK(0.2), feedback=feedback, rounding="stochastic")
    straight, resumed = ends(policy), ends(policy)
    for step in range(6):
        key = MessageKey(step, 0, 0, np.arange(5))
        if step == 3:
            path = tmp_path / "state.npz"
            for i, end in enumerate(resumed):
                np.savez(path, **end.state_dict())
                fresh = ends(policy)[i]
                with np.load(path) as state:
                    fresh.load_state_dict(dict(state))
                resumed = (fresh, resumed[1]) if i == 0 else (resumed[0], fresh)
        for back in (False, True):
            patterns = f32_patterns(rng(step).standard_normal(N))
            messages = [across(pair, patterns, key, back=back)[0] for pair in (straight, resumed)]
            assert np.array_equal(*messages)


def test_sample_buffers_in_a_file_are_those_in_memory(tmp_path: Path) -> None:
    policy = LinkPolicy(forward=Uniform(2), feedback="aqsgd")
    in_memory, in_file = ends(policy), ends(policy, samples=(tmp_path / "buffers", 20))
    for step in range(5):
        key = MessageKey(step, 0, 0, (np.arange(5) + 5 * step) % 15)
        patterns = f32_patterns(rng(step).standard_normal(N))
        assert np.array_equal(*(across(pair, patterns, key)[0] for pair in (in_memory, in_file)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["buffers.0-1.0.rx", "buffers.0-1.0.tx"]
    states = [pair[0].state_dict() for pair in (in_memory, in_file)]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    with pytest.raises(ConfigError, match=r"sample ids must be 0\.\.19"):
        across(in_file, patterns, MessageKey(9, 0, 0, np.arange(5) + 18))


def test_the_memory_of_feedback_is_that_of_its_page() -> None:
    for feedback, sender, receiver in ((None, 0, 0), ("ef", 1, 0), ("ef21", 1, 1), ("aqsgd", 1, 1)):
        pair = ends(LinkPolicy(forward=TopK(0.1), feedback=feedback))
        for microbatch in range(3):
            ids = np.arange(5) + 5 * microbatch
            across(pair, ONES, MessageKey(0, microbatch, 0, ids))
        entries = [end.state_dict().items() for end in pair]
        n_bytes = [
            sum(a.nbytes for name, a in items if name.endswith(("state", "rows"))) for items in entries
        ]
        assert n_bytes == [3 * N * 4 * sender, 3 * N * 4 * receiver]


def test_a_policy_may_lower_the_limit_of_small_tensors() -> None:
    lowered, default = LinkPolicy(forward=Uniform(4), min_elements=64), LinkPolicy(forward=Uniform(4))
    assert lowered.plan(FORWARD, F32, (64,)).codec == Uniform(4)
    assert lowered.plan(FORWARD, F32, (63,)).codec == RAW
    assert default.plan(FORWARD, F32, (4095,)).codec == RAW
    assert "min_elements" not in default.to_json()
    assert LinkPolicy.from_json(lowered.to_json()) == lowered
    assert lowered.digest != default.digest
