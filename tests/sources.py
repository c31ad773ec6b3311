"""Where the packages stand in this tree."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = [ROOT, ROOT / "kernels", ROOT / "server"]
"""Folders on the import path. pyproject.toml names them too."""


def modules(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package by name."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = {
    **modules(ROOT, "vmmkv"),
    **modules(ROOT / "kernels", "vmmkv_kernels"),
    **modules(ROOT / "server", "vmmkv_server"),
}
"""Every module that is installed, by name."""
