"""The rules of the house that no linter holds: budgets, names, borders, and documents that must keep up with the code.

Every rule is a function from source text to findings, and is shown to bite before it is trusted.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import dropwhile, takewhile
from pathlib import Path

import mlx_lm.models.cache
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "mlx_spec").rglob("*.py"))
OUTSIDE = sorted(path for part in ("tests", "scripts") for path in (ROOT / part).rglob("*.py"))
PYTHON = PACKAGE + OUTSIDE
KERNELS = sorted((ROOT / "metal").rglob("*.metal"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 7

SHAPED_LIKE_MLX_LM = {
    "mlx_spec/generate.py": ("generate", "stream_generate", "generate_step", "speculative_generate_step"),
    "mlx_spec/pairing.py": ("load",),
}
"""Module -> its functions that take mlx-lm's keyword arguments under mlx-lm's names."""

READS_ENVIRONMENT = ("mlx_spec/generate.py", "mlx_spec/commandline.py", "mlx_spec/environment.py")
NAMES_CACHE_CLASSES = ("mlx_spec/cache/adopt.py",)
FOREIGN = {
    "argparse": ("_actions",),
    "mlx_lm": ("_attn_res_mix", "_dummy_tokenizer_ids", "_get_classes", "_idx", "_temporal_order"),
    "namedtuple": ("_asdict", "_replace"),
    "os": ("_exit",),
    "pytest": ("_arggroup",),
    "sys": ("_getframe",),
}
"""Private names of others, by owner, without which a test could not be."""

NAMELESS = ("utils", "util", "common", "helper", "helpers", "misc")

OWN_OBJECT = ("self", "cls")
BY_STRING = ("getattr", "setattr", "delattr", "hasattr", "patch", "object")
"""What is told by a string which attribute to reach: builtins, methods of monkeypatch, `mock.patch` and `.object`."""

MLX_LM_CACHES = frozenset(
    name
    for name, value in vars(mlx_lm.models.cache).items()
    if inspect.isclass(value) and value.__module__ == mlx_lm.models.cache.__name__ and name.endswith("Cache")
) | {"CacheList"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(source: str) -> ast.Module:
    """Every rule reads the same texts."""
    return ast.parse(source)


@cache
def functions(source: str) -> list[tuple[Function, bool]]:
    """Every function with whether it is a method."""
    return [
        (child, isinstance(node, ast.ClassDef))
        for node in ast.walk(parsed(source))
        for child in ast.iter_child_nodes(node)
        if isinstance(child, Function)
    ]


def long_functions(source: str, path: str = "") -> list[str]:
    """Functions over the budget, decorators left out, docstring counted."""
    lengths = [(node.name, node.end_lineno - node.lineno + 1) for node, _ in functions(source)]
    return [f"{name}: {length} lines" for name, length in lengths if length > MAX_FUNCTION_LINES]


def wide_functions(source: str, path: str = "") -> list[str]:
    """Functions with too many arguments; a method's own object is none."""
    found = []
    for node, is_method in functions(source):
        given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
        count = len(given) - (is_method and not static)
        exempt = node.name in SHAPED_LIKE_MLX_LM.get(path, ())
        if count > MAX_ARGUMENTS and not exempt:
            found.append(f"{node.name}: {count} arguments")
    return found


def private_exports(source: str, path: str = "") -> list[str]:
    """Names in `__all__` that begin with an underscore and are no dunder."""
    found = []
    for node in parsed(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
            found += [name for name in names if name.startswith("_") and not name.endswith("__")]
    return found


def environment_reads(source: str, path: str = "") -> list[str]:
    """Uses of the process environment."""
    if path in READS_ENVIRONMENT:
        return []
    words = ("environ", "environb", "getenv", "getenvb")
    tree = parsed(source)
    attributes = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    ]
    imports = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
    ]
    return [f"os.{name}" for name in attributes + imports if name in words]


def cache_class_names(source: str, path: str = "") -> list[str]:
    """Names of mlx-lm cache classes: imported, used, or compared with as a string."""
    if path in NAMES_CACHE_CLASSES:
        return []
    spelled = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            spelled += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            spelled.append(node.attr)
        elif isinstance(node, ast.Name):
            spelled.append(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            spelled.append(node.value)
    return [name for name in spelled if name in MLX_LM_CACHES]


def arrays_of_a_module(source: str, path: str = "") -> list[str]:
    """Arrays made while a module or a class is read. What is lazy belongs to the thread that made it."""
    del path
    made = []
    pending: list[ast.AST] = [parsed(source)]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            pending.append(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                made += [node.func.attr] if isinstance(owner, ast.Name) and owner.id == "mx" else []
    return made


def nameless_files(source: str, path: str = "") -> list[str]:
    """A file or folder is named after the idea it holds."""
    return [part for part in Path(path).with_suffix("").parts if part.strip("_") in NAMELESS]


def private_reaches(source: str, path: str = "") -> list[str]:
    """Private names of others: as attributes, in imports, and in strings that say which attribute to read or replace.

    What a test reaches by such a name, no change of the inside can leave alone.
    """
    spelled: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in OWN_OBJECT):
            spelled.append(node.attr)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            spelled += [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and _called(node) in BY_STRING:
            spelled += [given.value for given in node.args if isinstance(given, ast.Constant)]
    names = [part for name in spelled if isinstance(name, str) for part in name.split(".")]
    return [name for name in names if _is_private(name) and name not in itertools.chain(*FOREIGN.values())]


def _called(call: ast.Call) -> str:
    """Name of the function or method."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


Rule = Callable[[str, str], list[str]]
OUTSIDE_RULES: list[Rule] = [private_reaches]
PACKAGE_RULES: list[Rule] = [environment_reads, cache_class_names, arrays_of_a_module]
EVERYWHERE_RULES: list[Rule] = [long_functions, wide_functions, private_exports, nameless_files]


def findings(rule: Rule, paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}: {finding}" for finding in rule(path.read_text(encoding="utf-8"), name)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule", EVERYWHERE_RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_package_tests_and_scripts(rule: Rule) -> None:
    assert findings(rule, PYTHON) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_the_package(rule: Rule) -> None:
    assert findings(rule, PACKAGE) == []


@pytest.mark.parametrize("rule", OUTSIDE_RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_tests_and_scripts(rule: Rule) -> None:
    assert findings(rule, OUTSIDE) == []


def arguments(count: int) -> str:
    return ", ".join(f"a{i}" for i in range(count))


@pytest.mark.parametrize(
    ("rule", "path", "refused", "accepted"),
    [
        (long_functions, "", "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
        (long_functions, "", "class A:\n  async def f(self):\n" + "    x = 1\n" * 60, "x = 1\n" * 90),
        (wide_functions, "", f"def f({arguments(8)}): ...", f"def f({arguments(7)}, *a, **k): ..."),
        (wide_functions, "", f"def f(*, {arguments(8)}): ...", f"class A:\n  def f(self, {arguments(7)}): ..."),
        (wide_functions, "mlx_spec/generate.py", f"def run({arguments(8)}): ...", f"def generate({arguments(8)}): ..."),
        (wide_functions, "mlx_spec/pairing.py", f"def generate({arguments(8)}): ...", ""),
        (private_exports, "", "__all__ = ['load', '_load']", "__all__ = ['load', '__version__']"),
        (private_exports, "", "__all__: list[str] = ['_load']", "_all = ['_load']"),
        (environment_reads, "", "import os\nx = os.environ['A']", "import os\nx = os.path"),
        (environment_reads, "", "from os import getenv", "environ = {}"),
        (cache_class_names, "", "from mlx_lm.models.cache import KVCache", "from mlx_lm.models import cache"),
        (cache_class_names, "", "x = cache.RotatingKVCache", "x = cache.offset"),
        (cache_class_names, "", "type(c).__name__ == 'ArraysCache'", "'''Says what a KVCache is.'''"),
        (arrays_of_a_module, "", "NONE = mx.zeros((1, 0))", "def none():\n    return mx.zeros((1, 0))"),
        (arrays_of_a_module, "", "class A:\n    x = [mx.array(1)]", "FLOATS = (mx.float32, mx.bfloat16)"),
        (private_reaches, "", "x = tx._journals", "x = self._journals + cls._all"),
        (private_reaches, "", "x = self.tx._journals", "x = tx.__dict__, tx.caches, _"),
        (private_reaches, "", "make()._made.cache_clear()", "x = shape._replace(keys=3)"),
        (private_reaches, "", "from mlx_spec.generate import _kinds", "from mlx_lm.utils import _get_classes"),
        (private_reaches, "", "import mlx_spec._inside as inside", "from __future__ import annotations"),
        (private_reaches, "", "patch.setattr(adopt, '_KEPT', {})", "patch.setattr(adopt, 'leaves', '_')"),
        (private_reaches, "", "patch.setattr('mlx_spec.generate._kinds', {})", "say('_kinds')"),
        (private_reaches, "", "with mock.patch.object(adopt, '_KEPT', {}): ...", "with mock.patch('os.environ'): ..."),
        (private_reaches, "", "delattr(tx, '_journals')", "x = getattr(model, '_dummy_tokenizer_ids', None)"),
        (nameless_files, "mlx_spec/utils.py", "", None),
        (nameless_files, "tests/common/test_a.py", "", None),
        (nameless_files, "mlx_spec/_helpers.py", "", None),
    ],
)
def test_rules_bite(rule: Rule, path: str, refused: str, accepted: str | None) -> None:
    assert rule(refused, path)
    assert accepted is None or rule(accepted, path) == []


def test_rules_spare_the_files_they_name() -> None:
    assert environment_reads("import os\nx = os.environ", "mlx_spec/commandline.py") == []
    assert cache_class_names("x = KVCache()", "mlx_spec/cache/adopt.py") == []
    assert nameless_files("", "mlx_spec/cache/append.py") == []


def test_files_stay_within_the_budget() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PYTHON + KERNELS}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def runtime_imports(source: str, modules: Collection[str]) -> set[str]:
    """Modules of ours that a module imports when it runs, wherever in it the import stands."""
    tree = parsed(source)
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) in NEVER_IMPORTED]
    spared = {id(inner) for guard in guarded for inner in ast.walk(guard)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in spared:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in modules else node.module for name in names)
    return found & set(modules)


NEVER_IMPORTED = ("TYPE_CHECKING", "__name__ == '__main__'")
"""Guards of what runs in no import."""


def first_cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty when none do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE}
    imports = {name: runtime_imports(path.read_text(encoding="utf-8"), paths) for name, path in paths.items()}
    assert sum(map(len, imports.values())) > 300
    assert first_cycle(imports) == []


def test_a_circle_of_imports_is_seen_wherever_the_import_stands() -> None:
    inside = "def f() -> None:\n    from mlx_spec import b\n"
    guarded = "if TYPE_CHECKING:\n    from mlx_spec.b import B\n"
    for source, wanted in ((inside, {"mlx_spec.b"}), ("import mlx_spec.b", {"mlx_spec.b"}), (guarded, set())):
        assert runtime_imports(source, ("mlx_spec.a", "mlx_spec.b")) == wanted
    assert first_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert first_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def metal_table() -> dict[str, list[str]]:
    """Rows of the kernel table, the first of the page: file name to the other cells."""
    lines = (ROOT / "metal" / "README.md").read_text(encoding="utf-8").splitlines()
    table = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert rows[0] == ["file", "op", "reference", "test", "promise"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_every_kernel_has_a_row_and_every_row_a_kernel() -> None:
    assert sorted(metal_table()) == [path.relative_to(ROOT / "metal").as_posix() for path in KERNELS]


def test_every_kernel_row_is_filled_and_its_test_exists() -> None:
    for file, cells in metal_table().items():
        assert all(cells), f"metal/README.md leaves a cell of {file} empty"
        test = cells[2].strip("`").split("::")[0]
        assert (ROOT / test).is_file(), f"metal/README.md names {test} as the test of {file}; there is no such file"


def test_every_command_line_flag_is_documented() -> None:
    if importlib.util.find_spec("mlx_spec.commandline") is None:
        pytest.skip("mlx_spec.commandline does not exist yet")
    parser = importlib.import_module("mlx_spec.commandline").parser()
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    documented = set(re.findall(r"`(--[a-z0-9-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert flags - documented - {"--help"} == set()


def test_decisions_are_numbered_without_a_gap_and_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    names = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    numbers = [re.fullmatch(r"(\d{4})-[a-z0-9-]+\.md", name) for name in names]
    assert all(numbers), f"a decision is called NNNN-what-was-decided.md, got {names}"
    assert [int(number[1]) for number in numbers if number] == list(range(1, len(names) + 1))
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == names
