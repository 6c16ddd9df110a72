"""Trees that a reader must refuse when it builds the nested checkpoint; see `spec_cases`."""

from typing import Any

from tests.support.spec_files import File, Frame, Input


def tree(root: Any, storages: Any = (), names: tuple[str, ...] = ("w",), **fields: Any) -> File:
    """Build a file of tensors of four bytes with a tree."""
    index = {"tree": {"root": root, "storages": storages, **fields}}
    return File({name: Frame() for name in names}, index=index)


def node(value: Any, *storages: list[str], names: tuple[str, ...] = ("w",)) -> File:
    """Build a tree with this node and one that names the tensor."""
    return tree({"dict": [["w", {"tensor": "w"}], ["n", value]]}, list(storages), names)


def keyed(*items: Any) -> File:
    """Build a tree with these items of a dictionary."""
    return node({"dict": list(items)})


def view(shape: list[int], strides: list[int], offset: int = 0, number: int = 0) -> File:
    """Build a tree with a view of a storage of one tensor of four bytes."""
    value = {"view": number, "dtype": "int8", "shape": shape, "strides": strides, "offset": offset}
    return node(value, ["s"], names=("w", "s"))


def nested(levels: int) -> Any:
    """Nest lists in each other."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


W = {"tensor": "w"}
TREE: dict[str, list[Input]] = {
    "N1": [
        File(index={"tree": {}}),
        File(index={"tree": {"root": W}}),
        tree(W, more=1),
        *(tree(W, storages) for storages in ({}, ["w"], [[1]])),
    ],
    "N2": [
        node(value)
        for value in (
            *(1.5, 1 << 53, {}, {"set": []}, {"tuple": [], "dict": []}, {"tuple": {}}, {"dict": {}}),
            *({"int": "0x1"}, {"int": "0x020000000000000"}, {"int": "0X20000000000000"}, {"int": 3}),
            *({"float": "3f50624dd2f1a9f"}, {"float": "3F50624DD2F1A9FC"}, {"float": 1.0}),
            *({"bytes": "AP8"}, {"bytes": "AP9="}, {"bytes": "AP8=\n"}, {"bytes": 1}),
            *({"Size": 3}, {"Size": [1.0]}, {"Size": [True]}, {"Size": [1 << 64]}),
            *({"dtype": "torch.float32"}, {"dtype": ""}, {"dict": [], "_metadata": None}),
            *({"OrderedDict": [], "other": 1}, {"tensor": 1}, {**W, "parameter": 1}),
            *({**W, "requires_grad": False}, {**W, "shape": [4]}, {"view": 0}),
        )
    ],
    "N3": [node(nested(64)), keyed([{"tuple": [nested(80)]}, 1])],
    "N4": [
        keyed([1]),
        keyed([1, 2, 3]),
        *(
            keyed([key, 2])
            for key in (
                *([1], {"dict": []}, W, {"tuple": [W]}, {"tuple": [[1]]}, {"tuple": [0] * 5}),
                *({"int": "0x10000000000000000"}, {"tuple": [{"int": "-0x10000000000000000"}]}),
            )
        ),
    ],
    "N5": [
        keyed([1, 2], [1, 3]),
        keyed([1, 2], [True, 3]),
        keyed([1, 2], [{"float": "3ff0000000000000"}, 3]),
        keyed([{"float": "7ff8000000000000"}, 2], [{"float": "7ff8000000000000"}, 3]),
    ],
    "N6": [
        *(tree({**W, "strides": strides}) for strides in ([-1], None, [2], [1, 1], [1.0], [1 << 63])),
        view([1], []),
        view([1 << 63], [1]),
        view([-1], [1]),
    ],
    "N7": [
        tree([W, {"tensor": "v"}]),
        tree([W], names=("w", "v")),
        tree([W], [["w"]]),
        tree([W], [["s"], ["s"]], names=("w", "s")),
        tree([W], [["s", "s"]], names=("w", "s")),
        tree([W], [["v"]]),
    ],
    "N8": [view([], [], number=1), view([5], [1]), view([4], [1], 1), view([2], [4])],
}
