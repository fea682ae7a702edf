"""Imports point one way (docs/design.md): pure modules, command-line programs and the engine side keep their borders.

What a module imports is read from its source, imports inside functions included; what an import really loads is looked
at in a fresh interpreter.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_jap

PACKAGE = Path(slurm_jap.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

PURE = {
    "array_spec", "carried", "conf", "errors", "filename_pattern", "resources", "sbatch_options", "schedule", "sweep",
}  # fmt: skip
"""Pure by design; any other module whose text calls itself pure is held to it as well."""
PROGRAMS = {"submit", "status", "cancel", "plan", "run", "sim"}
LOGIN_SIDE = {"submit", "status", "cancel", "plan"}
ENGINE_SIDE = {"client", "blocks", "microbatch", "stage", "transport", "engine", "checkpoint"}
"""The engine side by design; any other module that imports torch belongs to it."""
NEVER_PURE = {"torch", "rich", "subprocess", "socket", "asyncio", "multiprocessing", "urllib", "tempfile", "shutil"}


@functools.cache
def imports(module: str, lazy: bool = True) -> frozenset[str]:
    """Full names that a module imports: at its top, and, if ``lazy``, inside functions. Type checking apart."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.add(node.module or "")
            if node.module == "slurm_jap":
                found.update(f"slurm_jap.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return frozenset(found)


def ours(names: frozenset[str]) -> set[str]:
    """The modules of this package among them."""
    return {name.split(".")[1] for name in names if name.startswith("slurm_jap.")} & set(MODULES)


def top(names: frozenset[str]) -> set[str]:
    """First parts of the names: ``torch`` for ``torch.nn``."""
    return {name.partition(".")[0] for name in names}


def closure(module: str, lazy: bool = True) -> set[str]:
    """The module and every module of this package that it imports, directly or not."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting |= ours(imports(one, lazy)) - found
    return found


def calls_itself_pure(module: str) -> bool:
    text = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text())) or ""
    return re.search(r"\bPure\b", text) is not None


def existing(names: set[str]) -> list[str]:
    return sorted(names & set(MODULES))


def loaded(module: str, *arguments: str) -> set[str]:
    """Names of all modules that ``import slurm_jap.<module>`` loads in a fresh interpreter."""
    program = f"import slurm_jap.{module}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, *arguments, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


PURE_ONES = sorted({*existing(PURE), *(module for module in MODULES if calls_itself_pure(module))})
ENGINE_ONES = sorted({*existing(ENGINE_SIDE), *(module for module in MODULES if "torch" in top(imports(module)))})


def test_the_design_names_modules_that_exist() -> None:
    assert set(MODULES) >= PURE
    assert set(MODULES) >= {"status", "store", "wire"}


@pytest.mark.parametrize("module", PURE_ONES)
def test_pure_modules_import_only_pure_ones(module: str) -> None:
    assert top(imports(module)) & NEVER_PURE == set()
    assert ours(imports(module)) <= {*PURE_ONES, "_version"}


@pytest.mark.parametrize("module", PURE_ONES)
def test_pure_modules_open_nothing_by_name(module: str) -> None:
    """``check_file`` of conf is the documented exception: it reads the file that it checks."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (module, function.name) == ("conf", "check_file"):
            function.body = []
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called & {"open", "print", "input", "exec", "eval"} == set()


def test_pure_modules_load_nothing_heavy() -> None:
    program = "import sys\n" + "".join(f"import slurm_jap.{module}\n" for module in PURE_ONES) + "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) & {"torch", "rich", "subprocess", "socket", "asyncio", "cloudpickle"} == set()


@pytest.mark.parametrize("module", existing(PROGRAMS))
def test_programs_never_reach_torch(module: str) -> None:
    for reached in closure(module):
        assert top(imports(reached)) & {"torch", "cloudpickle"} == set(), f"{module} reaches {reached}"


@pytest.mark.parametrize("module", existing(PROGRAMS))
def test_programs_load_neither_torch_nor_rich(module: str) -> None:
    assert loaded(module) & {"torch", "rich", "cloudpickle", "numpy"} == set()


@pytest.mark.parametrize("module", existing(LOGIN_SIDE))
def test_login_side_programs_leave_slurm_commands_to_slurm(module: str) -> None:
    assert "subprocess" not in top(imports(module))


@pytest.mark.parametrize("module", ENGINE_ONES)
def test_engine_side_never_reaches_slurm(module: str) -> None:
    assert "slurm" not in closure(module)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_a_program(module: str) -> None:
    assert ours(imports(module)) & (PROGRAMS - {module}) == set()


def test_modules_import_each_other_in_no_circle() -> None:
    for module in MODULES:
        for other in ours(imports(module, lazy=False)):
            assert module not in closure(other, lazy=False), f"{module} and {other} import each other"
