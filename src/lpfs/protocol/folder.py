"""The folder of a run: begun once, gone on with only under the same settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lpfs.errors import InputError
from lpfs.protocol.settings import CONFIG, Settings

BEFORE = (CONFIG, "data")  # what is there before anything is trained: a run that was refused can be begun again


def open_folder(folder: Path, wanted: Settings, *, resume: bool, replace: bool) -> Path:
    """Return the folder, with the settings saved in it; refuse one that holds something else."""
    config = folder / CONFIG
    if config.exists() and resume:
        saved = Settings.load(config).to_json()
        for name, value in json.loads(json.dumps(wanted.to_json())).items():
            if saved[name] != value:
                raise InputError(
                    f"the run in {folder} was begun with {name}={saved[name]!r} and cannot go on with {value!r}; "
                    "use the same settings, or another folder"
                )
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not config.exists():
            raise InputError(f"{folder} is not empty and holds no run; choose another folder")
        if replace:
            shutil.rmtree(folder)
        elif any(each.name not in BEFORE and not each.name.startswith(".") for each in folder.iterdir()):
            raise InputError(
                f"{folder} holds a run already; go on with --resume, or put a new one there with --replace"
            )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(wanted.to_json(), indent=1, ensure_ascii=False) + "\n"
    aside = folder / (CONFIG + ".new")
    aside.write_text(text, "utf-8")
    aside.replace(config)
    return folder
