"""The fastest mesh of train.parallel for a number of GPUs, with and without stages of a pipeline, over networks of several rates,
by the predictions of scaling.py."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.config.report import ConfigError
from llmtrain.pictures import new_figure, save_figure
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.plan.scaling import Cluster, Scale, predicted
from llmtrain.schema.config import Config

STAGES, VIRTUAL, TENSOR = (1, 2, 4, 8, 16), (1, 2), (1, 2, 4, 8)


@dataclass(frozen=True)
class Found:
    """A mesh in words, and its prediction."""

    mesh: str
    scale: Scale


@dataclass(frozen=True)
class AtRate:
    """link: of the network, bytes per second and GPU. without, with_stages: the fastest meshes that fit; None: none does."""

    link: float
    without: Found | None
    with_stages: Found | None


def configs(read: Callable[[Sequence[str]], Config]) -> Iterator[Config]:
    """The config on every mesh that it can run on. read: the config with further settings; raises ConfigError."""
    for stages in STAGES:
        for virtual in VIRTUAL if stages > 1 else (1,):
            for tensor in TENSOR:
                values = {"pipeline": stages, "virtual_stages": virtual, "tensor": tensor}
                try:
                    yield read([f"train.parallel.{name}={n}" for name, n in values.items()])
                except ConfigError:
                    continue


def over_links(
    some: Sequence[Config], rate: float, place: Cluster, links: Sequence[float], memory: float, gpus: int
) -> list[AtRate]:
    """rate: tokens/s of one GPU alone. place: the nodes. links: rates of the network in place of theirs, bytes per second and GPU.
    memory: bytes of a GPU."""
    sizes, found = [parameter_sizes(config) for config in some], []
    for link in links:
        best: dict[bool, Found] = {}
        for config, of in zip(some, sizes, strict=True):
            scale = predicted(config, of, rate, replace(place, link=link), memory, gpus)
            staged, parallel = config.train.parallel.pipeline > 1, config.train.parallel
            if scale.fits and (staged not in best or scale.step_seconds < best[staged].scale.step_seconds):
                virtual = f", {parallel.virtual_stages} parts each" if parallel.virtual_stages > 1 else ""
                best[staged] = Found(f"{parallel.describe() or 'data-parallel'}{virtual}, {scale.sharding}", scale)
        found.append(AtRate(link, best.get(False), best.get(True)))
    return found


def draw_links(found: Sequence[AtRate], path: Path, title: str) -> None:
    """Tokens/s over the network's rate, with and without stages, as a PNG or SVG. Raises OutputError where it cannot be written."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for label, name, marker in (("with stages", "with_stages", "o-"), ("without", "without", "s--")):
        points = [(one.link * 8 / 1e9, best) for one in found if (best := getattr(one, name)) is not None]
        rates, speeds = [rate for rate, _ in points], [best.scale.tokens_per_second / 1e3 for _, best in points]
        axes.semilogx(rates, speeds, marker, base=2, label=label)
        before = None
        for rate, speed, (_, best) in zip(rates, speeds, points, strict=True):
            if best.mesh != before:
                axes.annotate(best.mesh, (rate, speed), (7, -11), textcoords="offset points", fontsize=7)
            before = best.mesh
    ticks = [one.link * 8 / 1e9 for one in found]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 2.5)
    axes.set_ylim(0, None)
    axes.set_xlabel("network, Gbit/s per GPU")
    axes.set_ylabel("thousand tokens/s")
    axes.set_title(f"{title}: predicted, the fastest mesh at each rate", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path, make_folder=True)
