"""Ask the extension's functions on plain values, in a process of its own.

The extension registers a CUDA device with torch; other tests must not run in a process that has one.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_SERVER = """
import json, sys
from refshard.fakecuda.activate import load

module = load()

def made(kind, properties):
    value = getattr(module, kind)()
    for name, given in properties.items():
        setattr(value, name, given)
    return value

answers = []
for function, arguments in json.load(sys.stdin):
    arguments["capability"] = made("Capability", arguments["capability"])
    if "settings" in arguments:
        arguments["settings"] = made("AttentionSettings", arguments["settings"])
    try:
        answers.append(getattr(module, function)(**arguments))
    except (RuntimeError, ValueError) as error:
        answers.append(str(error).splitlines()[0])
json.dump(answers, sys.stdout)
"""


def ask(questions: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What each ``(function, arguments)`` returns, or the first line of its error.

    ``capability`` and ``settings`` are given as what differs from the defaults (an H100, everything allowed).
    """
    command = [sys.executable, "-c", _SERVER]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found
