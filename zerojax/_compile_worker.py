"""Compiles one exported program for GPUs that are not there: the process behind `compile_for`.

Run as a script, so that it starts with the environment that the compiler needs and a crash of the
compiler ends nothing else. Reads `request.json` and `program.bin` in the folder that it is given,
writes `program.hlo` and `memory.json`, or `error.txt`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compiles what is in the folder."""
    request = json.loads((folder / "request.json").read_text())
    devices = topologies.get_topology_desc(platform="cuda", **request["topology"]).devices
    order = np.array(request["devices"])
    mesh = Mesh(np.array(devices)[order], request["axis_names"])
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    arguments = []
    for aval, given in zip(program.in_avals, request["arguments"], strict=True):
        sharding = None
        if given is not None:
            spec = P(*(tuple(e) if isinstance(e, list) else e for e in given["spec"]))
            sharding = NamedSharding(mesh, spec, memory_kind=given["memory_kind"])
        arguments.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))

    def call(*args: jax.Array) -> object:
        return program.call(*args)

    call.__name__ = request["name"]
    jitted = jax.jit(call, donate_argnums=tuple(request["donated"]), keep_unused=True)
    compiled = jitted.lower(*arguments).compile(compiler_options=request["xla_options"])
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    (folder / "memory.json").write_text(json.dumps(sizes))
    (folder / "program.hlo").write_text(compiled.as_text() or "")


if __name__ == "__main__":
    here = Path(sys.argv[1])
    try:
        main(here)
    except Exception as error:
        (here / "error.txt").write_text(f"{type(error).__name__}: {error}")
        raise
