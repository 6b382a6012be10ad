"""Files of weights, as `socflower run --save-model` writes them; reading one needs no torch."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError


def read_weights(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz by name; `ConfigError` for a file that cannot be read."""
    try:
        # The file may be untrusted, so pickle is not allowed.
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                return dict(found)
    except FileNotFoundError:
        problem = "no such file; `socflower run --save-model` writes one"
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        first_line = str(error).partition("\n")[0]
        problem = f"not a readable .npz file: {first_line}"
    else:
        problem = "a single array; give the .npz that a run saved"
    raise ConfigError(f"weights {path}: {problem}")
