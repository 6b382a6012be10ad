"""Execute the notebooks in place: `make notebooks`. What they print and draw is kept, but not when they did."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"

for path in sorted(FOLDER.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        record_timing=False,
        # Else a text is in as many pieces as the kernel sent.
        coalesce_streams=True,
        resources={"metadata": {"path": FOLDER}},
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.language_info.pop("version", None)
    nbformat.write(notebook, path)
