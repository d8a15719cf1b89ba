"""The command line: `statestream demo`, `plan`, `doctor` and `convert`.

Nothing heavy is imported before a command runs, so that --help and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from statestream.extras import cli_extra
from statestream.formats import Role, formats_of

__all__ = ["app", "main"]

FAILED = 1
"""Exit status of a command that ran and found that something is not as it should be."""
REFUSED = 2
"""Exit status of a command that could not do what it was asked."""
INTERRUPTED = 130

_UsageError = typer.BadParameter.__base__
"""click's UsageError; typer brings a copy of click in newer versions, and does not name it."""

_MOMENTS = " or ".join(", ".join(formats_of(Role.MOMENT)).rsplit(", ", 1))

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Adam whose state is small, whose checkpoint export is bounded, and whose step streams.",
)


class Refused(Exception):
    """Something the user can put right, in one line."""


@app.callback()
def _commands() -> None:
    # With a callback the name of a command stays part of the command line while there is only one.
    pass


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Steps of each of the two runs.")] = 150,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for loss.png and memory.png.")] = Path("demo"),
    moments: Annotated[str, typer.Option(help=f"How the moments are stored: {_MOMENTS}.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of the initial weights and the batches.")] = 0,
    ranks: Annotated[int, typer.Option(help="Processes that shard the model by FSDP2: 1, 2, 4 or 8.")] = 1,
    plant: Annotated[Optional[str], typer.Option(hidden=True)] = None,  # noqa: UP045 - typer evaluates it
) -> int:
    """Train a small GPT on the source of Python's standard library, save it half way with
    torch.distributed.checkpoint, resume in a fresh optimizer, and compare with a run that never stopped.

    With --ranks it is resumed on as many ranks, and also on half as many, where the losses are compared.

    Exit status: 0 the runs are equal bit for bit (on other ranks close), 1 they are not, 2 it could not run.
    """
    # Read when torch is loaded: without it, a core that is busy elsewhere makes a step ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with cli_extra():
            from statestream.demo.command import demo as run_demo
        from statestream.demo.settings import Settings
    except ImportError as error:
        raise Refused(str(error)) from error
    try:
        settings = Settings.checked(
            steps=steps, device=device, out=out, moments=moments, seed=seed, control=plant, ranks=ranks
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    try:
        return run_demo(settings)
    except OSError as error:
        raise Refused(str(error)) from error


@app.command()
def plan(
    source: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it
        typer.Argument(help="A Hugging Face config.json, safetensors files or their index, a DCP checkpoint."),
    ] = None,
    params: Annotated[Optional[str], typer.Option(help="Instead: so many parameters, 8e9 or 8B.")] = None,  # noqa: UP045
    layers: Annotated[Optional[int], typer.Option(help="With --params: in so many layers.")] = None,  # noqa: UP045
    ranks: Annotated[Optional[int], typer.Option(help="Ranks that shard it all, as FSDP2 does.")] = None,  # noqa: UP045
    mesh: Annotated[Optional[str], typer.Option(help="Instead: replicate=2,shard=8,tensor=4.")] = None,  # noqa: UP045
    weights: Annotated[Optional[str], typer.Option(help="fp32, bf16, fp16 or fp8; as the source says.")] = None,  # noqa: UP045
    grads: Annotated[Optional[str], typer.Option(help="The same, of gradients; as the weights.")] = None,  # noqa: UP045
    moments: Annotated[str, typer.Option(help=f"{_MOMENTS}; two for exp_avg,exp_avg_sq.")] = "fp32",
    masters: Annotated[str, typer.Option(help="Of 16-bit weights: fp32, fp16, remainders or none.")] = "fp32",
    offload: Annotated[bool, typer.Option("--offload", help="State in host memory: CPUOffloadOptimizer.")] = False,
    chunk: Annotated[Optional[str], typer.Option(help="Its step_chunk_bytes, such as 1GiB.")] = None,  # noqa: UP045
    offload_gradients: Annotated[
        bool, typer.Option("--offload-gradients", help="Gradients in host memory too, in FP32.")
    ] = False,
    export: Annotated[str, typer.Option(help="Where a checkpoint export goes: device or host.")] = "device",
    staging: Annotated[str, typer.Option(help="export_staging_bytes.")] = "64MiB",
    gpu_memory: Annotated[Optional[str], typer.Option(help="Propose what fits, such as 80GiB.")] = None,  # noqa: UP045
    reserve: Annotated[Optional[str], typer.Option(help="Kept of it for activations; a fifth.")] = None,  # noqa: UP045
    link: Annotated[Optional[str], typer.Option(help="Host to device, each way: 55GB/s.")] = None,  # noqa: UP045
    device_bandwidth: Annotated[Optional[str], typer.Option(help="Of device memory: 4TB/s.")] = None,  # noqa: UP045
    disk: Annotated[Optional[str], typer.Option(help="Of one rank's disk: 2GB/s.")] = None,  # noqa: UP045
    json: Annotated[bool, typer.Option("--json", help="Print bytes and seconds as JSON.")] = False,
    png: Annotated[Optional[Path], typer.Option(help="Draw stacked bars into this file.")] = None,  # noqa: UP045
) -> int:
    """Bytes that training takes on each rank: weights, gradients, optimizer state, and on top of them a step, a
    checkpoint export and a load. With --gpu-memory it proposes the least intrusive way that fits.

    Exit status: 0 planned, 1 nothing fits the GPU, 2 it could not be planned.
    """
    from statestream.planner.command import plan_files, show
    from statestream.planner.quantities import BadOption
    from statestream.planner.settings import Settings
    from statestream.planner.times import Rates

    try:
        settings = Settings.checked(
            weights=weights,
            grads=grads,
            moments=moments,
            masters=masters,
            offload=offload,
            chunk=chunk,
            export=export,
            staging=staging,
            offload_gradients=offload_gradients,
        )
        made = plan_files(
            source,
            params=params,
            layers=layers,
            ranks=ranks,
            mesh=mesh,
            settings=settings,
            rates=Rates.checked(link, device_bandwidth, disk),
            gpu_memory=gpu_memory,
            reserve=reserve,
        )
        show(made, json, png)
    except BadOption as error:
        raise _refused(error.name, error.problem) from error
    except ImportError as error:  # for --png
        raise Refused(str(error)) from error
    return FAILED if made.gpu_memory is not None and made.proposal is None else 0


def _refused(name: str, problem: str) -> Refused:
    """A positional argument speaks for itself; an option is called as it is written."""
    return Refused(problem if name == "source" else f"--{name.replace('_', '-')}: {problem}")


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> int:
    """What is built and usable on this machine, whether it computes the promised bits, and what to do about each
    problem.

    Exit status: 0 all is well, 1 there is a problem, 2 it could not be asked.
    """
    from statestream.doctor.checks import examine
    from statestream.doctor.command import report

    return report(examine(), json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder of torch.distributed.checkpoint, or a file of torch.save.")],
    target: Annotated[Path, typer.Argument(help="What is written; must not be there yet, nor be within the source.")],
    to: Annotated[str, typer.Option(help="torch, statestream or transformer_engine.")],
    origin: Annotated[Optional[str], typer.Option("--from", help="What it is now, of these; found.")] = None,  # noqa: UP045
    masters: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="float32 or remainders: made where there are none; weights: for torch, they become these."),
    ] = None,
    drop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="What may be lost: master_param, max_exp_avg_sq, step, or a state that no Adam has."),
    ] = None,
    adamw: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--adamw/--adam", help="Kind of weight decay, where the source does not say."),
    ] = None,
    optimizer: Annotated[Optional[str], typer.Option(help="Where its state is, such as optim; found.")] = None,  # noqa: UP045
    model: Annotated[Optional[str], typer.Option(help="Where the weights are; found.")] = None,  # noqa: UP045
) -> int:
    """Write a checkpoint anew, with the optimizer's state as torch.optim.AdamW, statestream's FusedAdam or
    Transformer Engine's FusedAdam loads it. All else in it is kept.

    Host memory does not grow with the checkpoint. The target appears when it is whole; the source is only read.

    Exit status: 0 converted, 2 it could not be: nothing was written.
    """
    try:
        from statestream.convert.command import convert as run_convert
    except ImportError as error:
        raise Refused(str(error)) from error
    options = {"source": origin, "masters": masters, "drop": drop or (), "adam_w_mode": adamw}
    try:
        run_convert(source, target, to, **options, optimizer=optimizer, model=model)
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error
    return 0


def main(args: list[str] | None = None) -> None:
    """The console script. Exits: 0 well, 1 a command found a fault, 2 bad input, in one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file may have a name that the terminal's encoding has no letters for
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(args=args, prog_name="statestream", standalone_mode=False)
    except (Refused, _UsageError) as error:
        text = error.format_message() if isinstance(error, _UsageError) else str(error)
        if text:  # none where typer has printed the help instead
            print(f"statestream: {' '.join(text.split())}", file=sys.stderr)
        status = REFUSED
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:  # newer typer returns it, older raises
        print("statestream: interrupted", file=sys.stderr)
    sys.exit(status or 0)
