"""Code of the user: functions and apps by `package.module:name`, and the source files of such a module."""

import ast
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from socflower.errors import ConfigError, SocflowerError

_NOT_OF_USERS = (
    str(Path(__file__).parent),
    *{sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")},
    "<frozen",
)
"""The beginnings of file names of this package, of installed packages and of Python itself."""


def import_attribute(target: str, folder: Path | None, what: str, advice: str) -> Any:
    """Return the attribute of a module by `package.module:name`, with `folder` first on the import path.

    Raises `ConfigError` for any failure of the import: "`what` cannot be loaded: reason; `advice`".
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # The module may have been written a moment ago.
    importlib.invalidate_caches()
    path, _, name = target.partition(":")
    try:
        module = importlib.import_module(path)
        found = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be loaded: {error}; {advice}") from None
    except SystemExit as end:
        raise ConfigError(
            f"{what} cannot be loaded: its module calls sys.exit({end.code!r}) outside of "
            "`if __name__ == '__main__'`"
        ) from None
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {raised(error)}") from error
    _require_place(module, folder, what)
    return found


def _require_place(module: ModuleType, folder: Path | None, what: str) -> None:
    """Raise `ConfigError` if `folder` has a module of this name, and another one was imported."""
    stem = module.__name__.replace(".", "/")
    actual = Path(module.__file__ or "").resolve()
    for file in () if folder is None else (folder / f"{stem}.py", folder / stem / "__init__.py"):
        if file.is_file() and file.resolve() != actual:
            raise ConfigError(
                f"{what} cannot be loaded: module {module.__name__!r} is {actual}, not {file}; rename it"
            )


def call(function: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> Any:
    """Return the result of a user's function; any exception of another kind becomes a `ConfigError` about `what`."""
    try:
        return function(**arguments)
    except SocflowerError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} failed: {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Return an exception as one line, with the file and line of the user's code that raised it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """Return " (file, line n)" of the innermost call in the user's code; without one, of the innermost call."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if frame.filename != __file__]
    own = [frame for frame in others if not frame.filename.startswith(_NOT_OF_USERS)]
    for frame in reversed(own or others):
        return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def own_sources(folder: Path, targets: Iterable[str]) -> dict[str, Path]:
    """Return the Python files in `folder` that the modules of `targets` need, by their path in it.

    These are the modules, the packages around them, and the modules of the folder that they import.
    """
    found: dict[str, Path] = {}
    waiting = [target.partition(":")[0] for target in targets]
    while waiting:
        name = waiting.pop().partition(".")[0]
        if not name:
            continue
        for file in (folder / f"{name}.py", *(folder / name).rglob("*.py")):
            path = file.relative_to(folder).as_posix()
            if path not in found and file.is_file():
                found[path] = file
                waiting += _imported(file)
    return dict(sorted(found.items()))


def _imported(file: Path) -> list[str]:
    """Return the modules in a file's import statements; none if it is not Python."""
    names: list[str] = []
    for node in _syntax(file):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return names


def _syntax(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree; none if it cannot be read now, which an import would report."""
    try:
        return [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError, OSError):
        return []


def require_main_guard(what: str, instead: str) -> None:
    """Raise `ConfigError` if this is called from a script's top level outside of `if __name__ == "__main__"`.

    Processes that are not plain forks import the script again, so each of them would start processes, too.
    """
    main = sys.modules.get("__main__")
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main):
            break
        frame = frame.f_back
    file = Path(getattr(main, "__file__", None) or "")
    # Code that is typed in or given by -c has no file, and is not imported again.
    if frame is None or not file.is_file() or Path(frame.f_code.co_filename) != file:
        return
    nodes, line = _syntax(file), frame.f_lineno
    branches = [
        node
        for node in nodes
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line)
    ]
    is_guarded = any("__name__" in ast.unparse(branch.test) for branch in branches)
    if nodes and not is_guarded:
        raise ConfigError(
            f"{file.name}, line {line}: {what} outside of `if __name__ == '__main__':`, and each of them "
            f"would run the script again; put what the script does under that line, or {instead}"
        )


@contextmanager
def forgotten_modules(folder: Path) -> Iterator[None]:
    """Forget the modules in `folder` at exit, since the next folder may have modules of the same names."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before
        inside = folder.resolve()
        # A list, since reading `__file__` of a lazy module may load others.
        modules = list(sys.modules.items())
        files = {name: str(getattr(module, "__file__", None) or "") for name, module in modules}
        # Resolving a path takes several system calls, and installed packages have thousands of modules.
        others = () if str(inside).startswith(_NOT_OF_USERS) else _NOT_OF_USERS
        for name, file in files.items():
            if file and not file.startswith(others) and Path(file).resolve().is_relative_to(inside):
                del sys.modules[name]
