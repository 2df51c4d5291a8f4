"""What a wheel holds beside the package, in trl_ext/scripts: recipes, public evaluation, configurations of accelerate.

Everything else is in pyproject.toml. A clone and an editable install use these folders where they are.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "public_eval", "accelerate_configs")
# What they consist of; whoever works in them leaves models, secrets and caches there.
SUFFIXES = (".py", ".ipynb", ".yaml", ".json", ".jsonl", ".md", ".sh", ".sbatch")
NOT_SHIPPED = ("runs", "wandb", "__pycache__")


def shipped_files() -> list[Path]:
    """The files to ship, from the repository's folder; none that is hidden or lies in a hidden folder."""
    files = (path for folder in SHIPPED for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return [
        path
        for path in files
        if path.suffix in SUFFIXES and not any(part in NOT_SHIPPED or part.startswith(".") for part in path.parts)
    ]


class BuildWithScripts(build_py):
    """Copies the folders below `trl_ext/scripts`, and lists them for a source distribution."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._scripts().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self._scripts()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._scripts().values()]

    def _scripts(self) -> dict[str, str]:
        return {str(path): str(Path(self.build_lib, "trl_ext", "scripts", path)) for path in shipped_files()}


# A build backend runs this file as the main one.
if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithScripts})
