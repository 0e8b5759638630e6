"""The rules of the source tree, checked on its syntax trees: layers, cycles, sizes, patching, tests, options.

Nothing of the package is imported here. Each checker takes parsed sources, so the end of the file shows on synthetic
sources that it does fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

TEST_ROOT = Path(__file__).parent
PACKAGE = "autoround_fp8"
PACKAGE_ROOT = TEST_ROOT.parent / PACKAGE

# Top to bottom. A unit is a folder or file right under the package; it imports itself and units of lower rows only.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("cli",),
    ("autoround", "convert", "evaluation"),
    ("pipeline",),
    ("model_source",),
    ("compressor", "export", "inference", "inspection", "mixed_precision"),
    ("block_quantizer", "block_walk"),
    ("plan", "model_card"),
    ("layer_plan",),
    ("calibration", "tuning", "formats"),
    ("models", "kernels"),
    ("nn", "checkpoint"),
    ("config",),
    ("schemes",),
    ("numerics", "records", "device"),
    ("errors", "version"),
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_RUN_LOOP_LINES = 100
RUN_LOOPS = {"compressor.py::BlockwiseCompressor.run"}

MAX_PARAMETERS = 8  # without self and cls
PUBLIC_ENTRY_POINTS = {
    "autoround.py::AutoRound.__init__",
    "evaluation/lm_eval_backend.py::AutoRoundFP8LM.__init__",
    "evaluation/compare.py::compare_checkpoints",
    "evaluation/tasks.py::run_tasks",
}

# Calls of hasattr and getattr per file; models/ is free. A new one needs a reason stronger than convenience.
ATTRIBUTE_PROBES: dict[str, int] = {
    "__init__.py": 1,
    "calibration/chat_text.py": 1,
    "calibration/data_rows.py": 1,
    "calibration/probes.py": 1,
    "calibration/record_encoder.py": 3,
    "cli/main.py": 2,
    "cli/quantize.py": 2,
    "evaluation/compare.py": 1,
    "evaluation/lm_eval_backend.py": 1,
    "evaluation/tasks.py": 4,
    "inference/linear.py": 2,
    "inference/load.py": 1,
    "model_source.py": 3,
    "plan.py": 1,
}

# Nothing but names or constants in them. Every package's own __init__.py is free too, as it holds a docstring only.
WITHOUT_TEST_FILE = {"__init__.py", "__main__.py", "version.py", "records.py"}

PATCHES_FILE = "models/patches.py"
FOREIGN = ("torch", "transformers")

Sources = Mapping[str, ast.Module]


def read_sources(root: Path) -> dict[str, ast.Module]:
    """Relative path -> syntax tree of every Python file under a folder."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(root.rglob("*.py"))
    }


def parse_all(**texts: str) -> dict[str, ast.Module]:
    """Synthetic sources; `a__b` stands for `a/b.py`."""
    return {re.sub(r"^([a-z]+)__", r"\1/", name) + ".py": ast.parse(text) for name, text in texts.items()}


def module_name(path: str) -> str:
    """`nn/observers.py` -> `autoround_fp8.nn.observers`."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The folder or file directly under the package that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(path: str, tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of this package that a tree imports anywhere, also inside functions and `if TYPE_CHECKING`."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
    return {name for name in found if name.split(".")[0] == PACKAGE}


def layer_violations(sources: Sources, layers: tuple[tuple[str, ...], ...] = LAYERS) -> list[str]:
    """Imports that point sideways or upward, and units the table does not know."""
    depth = {unit: row for row, units in enumerate(layers) for unit in units}
    modules = {module_name(path) for path in sources}
    bad = []
    for path, tree in sources.items():
        unit = unit_of(module_name(path))
        if unit not in depth:
            bad.append(f"{path}: {unit!r} has no row in LAYERS")
            continue
        for name in sorted(imported_modules(path, tree, modules)):
            other = unit_of(name)
            if other != unit and depth.get(other, -1) <= depth[unit]:
                bad.append(f"{path}: imports {name}, which is not below {unit!r}")
    return bad


def unknown_imports(sources: Sources) -> list[str]:
    """Imports of modules of this package that do not exist."""
    modules = {module_name(path) for path in sources}
    return [
        f"{path}: imports {name}, which does not exist"
        for path, tree in sources.items()
        for name in sorted(imported_modules(path, tree, modules) - modules)
    ]


def import_cycles(sources: Sources) -> list[str]:
    """Cycles between modules. The package's own __init__ is left out, as its names are resolved on first use."""
    modules = {module_name(path) for path in sources}
    graph = {
        module_name(path): imported_modules(path, tree, modules) & modules - {module_name(path)}
        for path, tree in sources.items()
        if path != "__init__.py"
    }
    cycles: list[str] = []
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycles.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in finished:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            finished.add(name)

    for name in sorted(graph):
        visit(name, ())
    return cycles


def star_imports(sources: Sources) -> list[str]:
    """Files with `from x import *`."""
    return [
        f"{path}:{node.lineno}: import *"
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name, nested ones and methods too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inner = (
            prefix + node.name + "."
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else prefix
        )
        yield from functions(node, inner)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the `def` to the end, without the docstring: documenting arguments costs nothing."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def long_functions(sources: Sources, run_loops: set[str] = RUN_LOOPS) -> list[str]:
    """Functions over the limit."""
    bad = []
    for path, tree in sources.items():
        for name, node in functions(tree):
            limit = MAX_RUN_LOOP_LINES if f"{path}::{name}" in run_loops else MAX_FUNCTION_LINES
            if body_lines(node) > limit:
                bad.append(f"{path}::{name}: {body_lines(node)} lines, at most {limit}")
    return bad


def wide_functions(sources: Sources, entry_points: set[str] = PUBLIC_ENTRY_POINTS) -> list[str]:
    """Functions outside kernels/ with too many parameters."""
    bad = []
    for path, tree in sources.items():
        for name, node in functions(tree):
            names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            count = len([a for a in names if a not in ("self", "cls")])
            if count > MAX_PARAMETERS and not path.startswith("kernels/") and f"{path}::{name}" not in entry_points:
                bad.append(f"{path}::{name}: {count} parameters, at most {MAX_PARAMETERS}")
    return bad


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def foreign_names(tree: ast.AST) -> set[str]:
    """Names that stand for torch or transformers, or for something in them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] in FOREIGN}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            found |= {a.asname or a.name for a in node.names}
    return found


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Every target that is assigned, augmented or deleted; tuples taken apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def foreign_patches(sources: Sources) -> list[str]:
    """Changes to torch or transformers, and swapped forwards, outside the one file that may make them."""
    bad = []
    for path, tree in sources.items():
        if path == PATCHES_FILE:
            continue
        foreign = foreign_names(tree)
        for target in assigned(tree):
            if isinstance(target, ast.Attribute):
                on_foreign = dotted(target).split(".")[0] in foreign
                if on_foreign or target.attr == "forward":
                    bad.append(f"{path}:{target.lineno}: assigns to {dotted(target) or target.attr}")
            elif isinstance(target, ast.Subscript) and dotted(target.value).endswith(".__dict__"):
                bad.append(f"{path}:{target.lineno}: assigns to {dotted(target.value)}[...]")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr") and node.args:
                first = dotted(node.args[0]).split(".")[0]
                name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
                if first in foreign or name == "forward":
                    bad.append(f"{path}:{node.lineno}: {dotted(node.func)} on {first}")
    return bad


def attribute_probes(sources: Sources) -> dict[str, int]:
    """Calls of hasattr and getattr per file, outside models/."""
    counts = {}
    for path, tree in sources.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and dotted(n.func) in ("hasattr", "getattr")]
        if calls and not path.startswith("models/"):
            counts[path] = len(calls)
    return counts


def probes_over_budget(sources: Sources, budget: Mapping[str, int] = ATTRIBUTE_PROBES) -> list[str]:
    """Files with more hasattr and getattr calls than their budget."""
    return [
        f"{p}: {n} hasattr/getattr, budget {budget.get(p, 0)}"
        for p, n in attribute_probes(sources).items()
        if n > budget.get(p, 0)
    ]


def without_docstring(sources: Sources) -> list[str]:
    """Files whose module has no docstring."""
    return [path for path, tree in sources.items() if not ast.get_docstring(tree)]


def without_test_file(sources: Sources, test_root: Path) -> list[str]:
    """Modules without `test/<same path>/test_<module>.py`."""
    missing = []
    for path in sources:
        expected = test_root / Path(path).parent / f"test_{Path(path).name}"
        if path not in WITHOUT_TEST_FILE and Path(path).name != "__init__.py" and not expected.is_file():
            missing.append(expected.relative_to(test_root.parent).as_posix())
    return missing


def option_strings(tree: ast.Module) -> list[str]:
    """Options of every `add_argument` in a file, sorted; loops over the module's literal tables are unrolled.

    Raises:
        ValueError: If an option's name cannot be told from the source.
    """
    tables = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                tables[node.targets[0].id] = list(ast.literal_eval(node.value))
            except (ValueError, TypeError):
                continue
    found = []

    def visit(node: ast.AST, loops: Mapping[str, list[str]]) -> None:
        if isinstance(node, ast.For):
            iterated = (
                dotted(node.iter.func).removesuffix(".items") if isinstance(node.iter, ast.Call) else dotted(node.iter)
            )
            target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            if iterated in tables and isinstance(target, ast.Name):
                loops = {**loops, target.id: tables[iterated]}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                found.extend(names_of(argument, loops))
        for child in ast.iter_child_nodes(node):
            visit(child, loops)

    visit(tree, {})
    return sorted(name for name in found if name.startswith("-"))


def names_of(argument: ast.expr, loops: Mapping[str, list[str]]) -> list[str]:
    """The strings that one argument of `add_argument` stands for."""
    if isinstance(argument, ast.Constant):
        return [str(argument.value)]
    if isinstance(argument, ast.Name) and argument.id in loops:
        return loops[argument.id]
    if isinstance(argument, ast.JoinedStr):
        texts = [""]
        for part in argument.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            texts = [text + tail for text in texts for tail in names_of(inner, loops)]
        return texts
    raise ValueError(f"line {argument.lineno}: the option's name is not a literal")


def options_by_parser(sources: Sources) -> dict[str, list[str]]:
    """File and top-level function that adds them -> sorted options, for every file in cli/."""
    found = {}
    for path, tree in sources.items():
        if path.startswith("cli/"):
            tables = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    options = option_strings(ast.Module(body=[*tables, node], type_ignores=[]))
                    if options:
                        found[f"{path}::{node.name}"] = options
    return found


# The command line is an interface: a change here is a decision, and belongs in the README.
FROZEN_OPTIONS: dict[str, str] = {
    "cli/evaluate.py::add_eval_parser": """
        --batch_size --debug --device --device_map --devices --dtype --eval_bs --include_path --kernel --limit
        --num_fewshot --output_path --task --tasks --trust_remote_code
    """,
    "cli/evaluate.py::add_compare_parser": """
        --batch_size --bs --dataset --debug --device --device_map --devices --dtype --json --kernel --nsample
        --nsamples --per_block --seed --seq_len --seqlen --trust_remote_code
    """,
    "cli/convert.py::add_convert_parser": """
        --debug --format --formats --max_shard_size --output_dir --overwrite --trust_remote_code
    """,
    "cli/inspect.py::add_inspect_parser": """
        --debug --json
    """,
    "cli/main.py::build_parser": """
        --version
    """,
    "cli/quantize.py::_add_tuning_options": """
        --act_headroom --algorithm --disable_quanted_input --disable_range_probes --enable_quanted_input
        --gradient_accumulate_steps --iter --iters --keep_layers --lr --minmax_lr --moe_input_scale
        --not_use_best_mse --target_kl --unseen_experts
    """,
    "cli/quantize.py::add_quantize_parser": """
        --act_bits --act_data_type --act_group_size --batch_size --bits --bs --calibration_dtype
        --data_type --dataset --debug --device --device_map --devices --disable_act_dynamic
        --enable_torch_compile --eval_bs --format --formats
        --fp_layers --group_size --ignore_layers --include_path
        --layer_config --limit --low_gpu_mem_usage --max_shard_size --model --model_name
        --model_name_or_path --nsample --nsamples --num_fewshot --output_dir
        --overwrite --quant_lm_head --scheme --seed --seq_len --seqlen --static_kv_dtype --task --tasks --train_bs
        --trust_remote_code
    """,
}


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    return read_sources(PACKAGE_ROOT)


def test_the_package_is_found(sources: Sources):
    assert "compressor.py" in sources
    assert len(sources) > 40


@pytest.mark.parametrize(
    "check",
    [
        layer_violations,
        unknown_imports,
        import_cycles,
        star_imports,
        long_functions,
        wide_functions,
        foreign_patches,
        probes_over_budget,
        without_docstring,
    ],
)
def test_source_tree(check: Callable[[Sources], list[str]], sources: Sources):
    assert check(sources) == []


def test_compressor_and_inference_never_import_each_other(sources: Sources):
    modules = {module_name(path) for path in sources}
    for path, tree in sources.items():
        units = {unit_of(name) for name in imported_modules(path, tree, modules)}
        unit = unit_of(module_name(path))
        assert unit != "compressor" or "inference" not in units, path
        assert unit != "inference" or "compressor" not in units, path


def test_files_are_short():
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE_ROOT.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_every_module_has_a_test_file(sources: Sources):
    assert without_test_file(sources, TEST_ROOT) == []


def test_lists_of_exceptions_hold_nothing_stale(sources: Sources):
    known = {f"{path}::{name}" for path, tree in sources.items() for name, _ in functions(tree)}
    assert known >= RUN_LOOPS | PUBLIC_ENTRY_POINTS
    assert sources.keys() >= WITHOUT_TEST_FILE
    assert {unit for row in LAYERS for unit in row} == {unit_of(module_name(p)) for p in sources}
    assert attribute_probes(sources).keys() >= ATTRIBUTE_PROBES.keys()


def test_command_line_is_frozen(sources: Sources):
    assert options_by_parser(sources) == {name: text.split() for name, text in FROZEN_OPTIONS.items()}


# From here on: the checkers themselves, on sources that break one rule each.


def test_layers_catch_upward_imports_inside_functions():
    broken = parse_all(
        nn__observers="def f():\n    from autoround_fp8.compressor import x",
        compressor="",
    )
    assert len(layer_violations(broken)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import autoround_fp8.inference.load",
        "from autoround_fp8 import inference",
        "from autoround_fp8.inference import load",
        "from .inference.load import x",
        "if TYPE_CHECKING:\n    from autoround_fp8.inference.load import x",
    ],
)
def test_layers_catch_compressor_importing_inference(line: str):
    assert len(layer_violations(parse_all(compressor=line, inference____init__="", inference__load=""))) == 1


def test_layers_allow_the_own_folder_and_lower_rows():
    fine = parse_all(
        nn__a="from autoround_fp8.nn import b\nfrom autoround_fp8 import errors\nimport torch", nn__b="", errors=""
    )
    assert layer_violations(fine) == []


def test_layers_catch_a_unit_without_a_row():
    assert len(layer_violations(parse_all(utils__misc=""))) == 1


def test_imports_of_missing_modules_are_caught():
    assert len(unknown_imports(parse_all(cli__main="from autoround_fp8.cli import gone\nimport autoround_fp8.no"))) == 2


def test_cycles_are_caught_also_in_one_folder():
    ring = {
        "nn__a": "from .b import x",
        "nn__b": "import autoround_fp8.nn.c",
        "nn__c": "def f():\n    from autoround_fp8.nn.a import y",
    }
    assert import_cycles(parse_all(**ring)) == [
        "autoround_fp8.nn.a -> autoround_fp8.nn.b -> autoround_fp8.nn.c -> autoround_fp8.nn.a"
    ]
    assert import_cycles(parse_all(**{**ring, "nn__c": ""})) == []


def test_star_imports_are_caught():
    assert len(star_imports(parse_all(plan="def f(): pass\nfrom torch import *"))) == 1


def test_function_length_counts_code_and_knows_the_run_loop():
    def text(lines: int) -> str:
        return (
            'class C:\n    def run(self):\n        """Doc.\n\n        More.\n        """\n' + "        x = 1\n" * lines
        )

    assert long_functions(parse_all(plan=text(59))) == []
    assert len(long_functions(parse_all(plan=text(60)))) == 1
    assert long_functions(parse_all(plan=text(99)), {"plan.py::C.run"}) == []
    assert len(long_functions(parse_all(plan=text(100)), {"plan.py::C.run"})) == 1


def test_parameters_count_keyword_only_ones_but_not_self():
    text = "class C:\n    def f(self, a, b, c, d, /, e, f, *, g, h{}): pass"
    assert wide_functions(parse_all(plan=text.format(""))) == []
    assert len(wide_functions(parse_all(plan=text.format(", i")))) == 1
    assert wide_functions(parse_all(plan=text.format(", i")), {"plan.py::C.f"}) == []
    assert wide_functions(parse_all(kernels__x=text.format(", i"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.nn.Linear.extra_repr = f",
        "from transformers import LlamaModel as M\nM.x, y = 1, 2",
        "from torch import nn\nsetattr(nn.Module, name, f)",
        "module.forward = f",
        "setattr(module, 'forward', f)",
        "module.__dict__['forward'] = f",
        "del module.__dict__['forward']",
    ],
)
def test_patches_are_caught_outside_their_file(line: str):
    assert len(foreign_patches(parse_all(inference__load=line))) == 1
    assert foreign_patches(parse_all(models__patches=line)) == []


def test_own_attributes_are_no_patches():
    assert foreign_patches(parse_all(plan="import torch\nself.x = torch.ones(1)\nx[torch.tensor(0)] = 1")) == []


def test_probes_are_counted_outside_models():
    text = "getattr(x, 'a', None)\nhasattr(x, 'b')"
    assert len(probes_over_budget(parse_all(plan=text), {"plan.py": 1})) == 1
    assert probes_over_budget(parse_all(plan=text), {"plan.py": 2}) == []
    assert probes_over_budget(parse_all(models__skeleton=text), {}) == []


def test_missing_docstrings_are_caught():
    assert without_docstring(parse_all(plan="x = 1", config='"""Text."""')) == ["plan.py"]


def test_missing_test_files_are_caught(tmp_path: Path):
    tests = tmp_path / "test"
    (tests / "nn").mkdir(parents=True)
    (tests / "nn" / "test_a.py").touch()
    broken = parse_all(nn__a="", nn__b="", nn____init__="", version="")
    assert without_test_file(broken, tests) == ["test/nn/test_b.py"]


def test_options_are_found_in_loops_and_refused_if_not_literal():
    text = (
        "NAMES = ('x', 'y')\nREASONS = {'--r': 'no'}\n"
        "def add(p):\n    p.add_argument('word')\n    p.add_argument('--b', '-a')\n"
        "    for n in NAMES:\n        p.add_argument(f'--{n}')\n"
        "    for o, r in REASONS.items():\n        p.add_argument(o, reason=r)\n"
    )
    assert options_by_parser(parse_all(cli__quantize=text)) == {
        "cli/quantize.py::add": ["--b", "--r", "--x", "--y", "-a"]
    }
    with pytest.raises(ValueError, match="not a literal"):
        option_strings(ast.parse("p.add_argument(name)"))
