"""`llmtrain launchers`: the job files for clusters that llmtrain brings, written to a folder. No torch here."""

import argparse
import shutil

from llmtrain.commands.arguments import output_path
from llmtrain.errors import UserError

FILES = ("slurm/pretrain.sbatch", "kubernetes/pretrain.yaml")


def add_launchers(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "launchers",
        help="job files for SLURM and Kubernetes, to submit and to change",
        description=f"Writes {' and '.join(FILES)} to a folder. Existing files are never replaced.",
    )
    parser.add_argument("out", type=output_path, metavar="DIR", help="folder to write them to")
    parser.set_defaults(func=launchers)


def launchers(args: argparse.Namespace) -> int:
    from llmtrain.config.shipped import ROOT

    for name in FILES:
        if (args.out / name).exists() or (args.out / name).is_symlink():
            raise UserError(f"{args.out / name} exists already, and is not replaced; name another folder")
    for name in FILES:
        try:
            (args.out / name).parent.mkdir(parents=True, exist_ok=True)
            with (ROOT / "scripts" / name).open("rb") as source, (args.out / name).open("xb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise UserError(f"cannot write {args.out / name}: {error.strerror or error}") from None
        print(args.out / name)
    return 0
