"""The jobs of ``docs/how-to/measure.md`` have their kinds' fields, and a command that torchrun and refshard take."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from msgspec import Meta, Struct
from torch.distributed.run import get_args_parser
from typer.main import get_command

from refshard.cli import app
from refshard.commands.launching import LAUNCHERS

DOCS = Path(__file__).parents[1] / "docs"
NODES, GPUS = 2, 8
Name = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Zero = Annotated[int, Meta(ge=0, le=0)]
"""No restarts: a harness that is restarted finds its folder taken."""


class Kubernetes(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """Fields as Kubernetes spells them; one that is not known here is an error."""


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    gpus: int = msgspec.field(name="nvidia.com/gpu")


class Resources(Kubernetes, frozen=True):
    limits: Limits


class VolumeMount(Kubernetes, frozen=True):
    name: Name
    mount_path: str


class Container(Kubernetes, frozen=True):
    name: Name
    image: str
    command: list[str]
    args: list[str]
    resources: Resources
    volume_mounts: list[VolumeMount]


class Claim(Kubernetes, frozen=True):
    claim_name: Name


class EmptyDir(Kubernetes, frozen=True):
    medium: Literal["Memory"]
    size_limit: Annotated[str, Meta(pattern=r"^\d+Gi$")]


class Volume(Kubernetes, frozen=True):
    name: Name
    persistent_volume_claim: Claim | None = None
    empty_dir: EmptyDir | None = None


class Metadata(Kubernetes, frozen=True):
    name: Name | None = None
    annotations: dict[str, str] = {}


class PodSpec(Kubernetes, frozen=True):
    containers: list[Container]
    volumes: list[Volume]
    restart_policy: Literal["Never"] = "Never"


class PodTemplate(Kubernetes, frozen=True):
    spec: PodSpec
    metadata: Metadata = Metadata()


class JobSpec(Kubernetes, frozen=True):
    parallelism: int
    completions: int
    completion_mode: Literal["Indexed"]
    backoff_limit: Zero
    template: PodTemplate


class JobTemplate(Kubernetes, frozen=True):
    spec: JobSpec


class ReplicatedJob(Kubernetes, frozen=True):
    name: Name
    replicas: int
    template: JobTemplate


class Network(Kubernetes, frozen=True):
    enable_dns_hostnames: bool = msgspec.field(name="enableDNSHostnames")
    publish_not_ready_addresses: bool


class FailurePolicy(Kubernetes, frozen=True):
    max_restarts: Zero


class JobSetSpec(Kubernetes, frozen=True):
    network: Network
    failure_policy: FailurePolicy
    replicated_jobs: list[ReplicatedJob]


class JobSet(Kubernetes, frozen=True):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


class RunPolicy(Kubernetes, frozen=True):
    backoff_limit: Zero
    clean_pod_policy: Literal["None"]


class Replicas(Kubernetes, frozen=True):
    replicas: int
    restart_policy: Literal["Never"]
    template: PodTemplate


class PyTorchJobSpec(Kubernetes, frozen=True):
    run_policy: RunPolicy
    pytorch_replica_specs: dict[Literal["Worker"], Replicas]


class PyTorchJob(Kubernetes, frozen=True):
    api_version: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: PyTorchJobSpec


class SkyResources(Struct, frozen=True, forbid_unknown_fields=True):
    infra: Literal["k8s"]
    accelerators: Annotated[str, Meta(pattern=r"^[\w-]+:\d+$")]


class SkyTask(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    resources: SkyResources
    num_nodes: int
    workdir: str
    volumes: dict[str, Name]
    setup: str
    run: str


def read(name: str, kind: type[Any]) -> Any:
    """An example, as its kind."""
    return msgspec.convert(yaml.safe_load((DOCS / "examples" / name).read_text()), kind)


def jobset() -> JobSet:
    found: JobSet = read("kubernetes-jobset.yaml", JobSet)
    return found


def pytorch_job() -> PyTorchJob:
    found: PyTorchJob = read("kubernetes-pytorchjob.yaml", PyTorchJob)
    return found


def pod_of_jobset() -> PodSpec:
    (job,) = jobset().spec.replicated_jobs
    return job.template.spec.template.spec


def pod_of_pytorch_job() -> PodSpec:
    return pytorch_job().spec.pytorch_replica_specs["Worker"].template.spec


PODS = pytest.mark.parametrize("pod", [pod_of_jobset(), pod_of_pytorch_job()], ids=["JobSet", "PyTorchJob"])


def check_launch(arguments: list[str], nodes: int, gpus: int, head: str) -> None:
    """That torchrun takes its arguments and starts a rank on each GPU, and refshard the rest."""
    given = get_args_parser().parse_args(arguments)
    assert (given.nnodes, given.nproc_per_node) == (str(nodes), str(gpus))
    assert (given.rdzv_backend, given.rdzv_endpoint) == ("c10d", f"{head}:29400")
    assert (given.no_python, given.max_restarts) == (True, 0)
    assert given.training_script == "refshard"
    command, *rest = given.training_script_args
    context = get_command(app).commands[command].make_context(command, rest)  # type: ignore[attr-defined]
    assert command == "run"
    assert context.params["launcher"] == "torchrun" in LAUNCHERS
    assert str(context.params["out"] or context.params["resume"]).startswith("/shared/")


@PODS
def test_a_pod_has_its_gpus_a_shared_volume_and_shared_memory(pod: PodSpec) -> None:
    (container,) = pod.containers
    assert container.command == ["torchrun"]
    assert container.resources.limits.gpus == GPUS
    paths = {mount.name: mount.mount_path for mount in container.volume_mounts}
    assert {volume.name for volume in pod.volumes} == paths.keys()
    assert {paths[v.name] for v in pod.volumes if v.persistent_volume_claim} == {"/shared"}
    assert {paths[v.name] for v in pod.volumes if v.empty_dir} == {"/dev/shm"}


def test_the_jobset_starts_a_pod_on_each_node_and_torchrun_meets_at_the_first() -> None:
    (job,) = jobset().spec.replicated_jobs
    assert (job.template.spec.parallelism, job.template.spec.completions, job.replicas) == (NODES, NODES, 1)
    name = jobset().metadata.name
    check_launch(pod_of_jobset().containers[0].args, NODES, GPUS, f"{name}-{job.name}-0-0.{name}")


def test_the_pytorch_job_starts_a_pod_on_each_node_and_torchrun_meets_at_the_first() -> None:
    workers = pytorch_job().spec.pytorch_replica_specs["Worker"]
    assert workers.replicas == NODES
    assert workers.template.spec.containers[0].name == "pytorch", "the operator asks for a container of this name"
    check_launch(workers.template.spec.containers[0].args, NODES, GPUS, f"{pytorch_job().metadata.name}-worker-0")


@pytest.mark.processes
def test_skypilots_script_calls_torchrun_on_each_node() -> None:
    task: SkyTask = read("skypilot.yaml", SkyTask)
    assert (task.num_nodes, task.resources.accelerators.split(":")[1]) == (NODES, str(GPUS))
    assert task.volumes.keys() == {"/shared"}
    told = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    script = f"set -eu; torchrun() {{ printf '%s\\n' \"$@\"; }}\n{task.run}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **told}, capture_output=True, text=True, check=True
    )
    check_launch(done.stdout.splitlines(), NODES, GPUS, "10.0.0.1")


def test_the_page_shows_the_jobsets_command_and_how_to_go_on() -> None:
    section = (DOCS / "how-to" / "measure.md").read_text().partition("### Kubernetes")[2].partition("\n### ")[0]
    first, again = (shlex.split(line)[1:] for line in section.splitlines() if line.startswith("torchrun "))
    assert first == pod_of_jobset().containers[0].args
    check_launch(again, NODES, GPUS, "refshard-nodes-0-0.refshard")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), 3),
        (("spec", "network", "enableDNSHostname"), True),
        (("metadata", "name"), "Ref_Shard"),
    ],
)
def test_a_field_that_is_wrong_is_refused(path: tuple[str | int, ...], value: object) -> None:
    changed = yaml.safe_load((DOCS / "examples" / "kubernetes-jobset.yaml").read_text())
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(changed, JobSet)
