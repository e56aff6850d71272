"""The Kubernetes manifests fit their schemas, and are as strict as the containers."""

import tomllib
from typing import Any

import pytest
import yaml
from tests.conftest import ROOT, missing

from fedring.client.config import ClientConfig
from fedring.server.config import ServerConfig

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    manifest for name in KUSTOMIZATION["resources"] for manifest in yaml.safe_load_all((FOLDER / name).read_text())
]
VERSIONS = ("1.31", "1.37")
SETS = [manifest for manifest in MANIFESTS if manifest["kind"] == "StatefulSet"]
PORT = {"fl-server": ServerConfig, "fl-client": ClientConfig}


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def config_of(name: str) -> dict[str, Any]:
    """Return the daemon's configuration from its ConfigMap."""
    (found,) = (m for m in MANIFESTS if m["kind"] == "ConfigMap" and m["metadata"]["name"] == name)
    (text,) = found["data"].values()
    return tomllib.loads(text)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_a_manifest_fits_the_schema(manifest: dict[str, Any], version: str) -> None:
    try:
        import kubernetes_validate
    except ImportError:
        missing("the package kubernetes-validate")
    kubernetes_validate.validate(manifest, version, strict=True)


def test_all_files_are_applied() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    namespaced = [manifest for manifest in MANIFESTS if manifest["kind"] != "Namespace"]
    assert {manifest["metadata"]["namespace"] for manifest in namespaced} == {KUSTOMIZATION["namespace"]}


@pytest.mark.parametrize("manifest", SETS, ids=name_of)
def test_a_pod_is_restricted_limited_and_given_time_to_drain(manifest: dict[str, Any]) -> None:
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert pod["terminationGracePeriodSeconds"] > config_of("fl-server")["drain_seconds"] + 5


@pytest.mark.parametrize("manifest", SETS, ids=name_of)
def test_a_daemon_listens_on_the_ports_of_its_pod_and_probes(manifest: dict[str, Any]) -> None:
    name = manifest["metadata"]["name"]
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    config = config_of(name)
    model: Any = PORT[name]
    model.model_validate({**config, "client_id": f"{name}-0"} if name == "fl-client" else config)
    listened = {key: int(config[key].rpartition(":")[2]) for key in config if key.endswith("listen")}
    assert sorted(listened.values()) == sorted(port["containerPort"] for port in container["ports"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == listened["health_listen"]
    assert container["livenessProbe"]["grpc"]["service"] == "alive"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in (*config["tls"].values(), config["state_dir"]):
        assert any(path == place or path.startswith(f"{place}/") for place in mounted), path


def test_every_port_of_a_service_is_a_port_of_its_pods() -> None:
    services = [manifest for manifest in MANIFESTS if manifest["kind"] == "Service"]
    for service in services:
        (pods,) = (m for m in SETS if m["spec"]["selector"]["matchLabels"] == service["spec"]["selector"])
        (container,) = pods["spec"]["template"]["spec"]["containers"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {p["name"] for p in container["ports"]}
        assert pods["spec"]["serviceName"] == service["metadata"]["name"]


def test_every_pod_has_a_network_policy_for_the_ports_that_others_use() -> None:
    policies = {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == "NetworkPolicy"}
    ports = {m["metadata"]["name"]: {p["name"] for p in containers_of(m)[0]["ports"]} for m in SETS}
    assert policies.keys() == ports.keys()
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert allowed == ports[name] - {"control", "health"}  # those come through the node
        assert all(rule["from"] for rule in policy["ingress"])
    for rule in policies["fl-client"]["egress"]:
        for peer in rule["to"]:
            if labels := peer.get("podSelector", {}).get("matchLabels"):
                assert {port["port"] for port in rule["ports"]} <= ports[labels["app.kubernetes.io/name"]]


def containers_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    containers: list[dict[str, Any]] = manifest["spec"]["template"]["spec"]["containers"]
    return containers


def test_every_secret_and_config_map_that_a_pod_mounts_is_applied_or_made_as_the_page_says() -> None:
    applied = {m["metadata"]["name"] for m in MANIFESTS if m["kind"] == "ConfigMap"}
    page = (ROOT / "docs" / "deployment.md").read_text()
    for manifest in SETS:
        for volume in manifest["spec"]["template"]["spec"]["volumes"]:
            if name := volume.get("secret", {}).get("secretName"):
                assert f"create secret generic {name}" in page
            elif name := volume.get("configMap", {}).get("name"):
                assert name in applied or f"create configmap {name}" in page


SHARED = ROOT / "deploy" / "kubernetes-shared"


def merged(base: Any, patch: Any) -> Any:
    """Return what kustomize makes of a manifest and a strategic merge patch, as far as ours need it."""
    if isinstance(base, dict) and isinstance(patch, dict):
        kept = {key: value for key, value in base.items() if patch.get(key, "") is not None}
        return kept | {key: merged(kept.get(key), value) for key, value in patch.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in each for each in (*base, *patch)):
        patches = {each["name"]: each for each in patch}
        return [merged(each, patches.pop(each["name"], {})) for each in base] + list(patches.values())
    return patch


def shared_manifests() -> list[dict[str, Any]]:
    """Return the manifests of two servers that share a state."""
    overlay = yaml.safe_load((SHARED / "kustomization.yaml").read_text())
    found = {name_of(manifest): manifest for manifest in MANIFESTS}
    assert overlay["resources"][0] == "../kubernetes"
    for name in overlay["resources"][1:]:
        found |= {name_of(each): each for each in yaml.safe_load_all((SHARED / name).read_text())}
    for patch in (yaml.safe_load((SHARED / each["path"]).read_text()) for each in overlay["patches"]):
        found[name_of(patch)] = merged(found[name_of(patch)], patch)
    named = {*overlay["resources"][1:], *(each["path"] for each in overlay["patches"]), "kustomization.yaml"}
    assert named == {path.name for path in SHARED.glob("*.yaml")}
    return list(found.values())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", shared_manifests(), ids=name_of)
def test_a_manifest_of_two_servers_fits_the_schema(manifest: dict[str, Any], version: str) -> None:
    test_a_manifest_fits_the_schema(manifest, version)


def test_clients_are_sent_to_the_leader_alone_and_a_standby_is_left_in_peace() -> None:
    found = {name_of(manifest): manifest for manifest in shared_manifests()}
    servers, budget = found["StatefulSet-fl-server"], found["PodDisruptionBudget-fl-server"]
    test_a_pod_is_restricted_limited_and_given_time_to_drain(servers)
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert servers["spec"]["replicas"] == 2
    assert servers["spec"]["updateStrategy"] == {"type": "OnDelete"}  # of two pods, one is never ready
    (container,) = containers_of(servers)
    health = int(config_of("fl-server")["health_listen"].rpartition(":")[2])
    assert container["readinessProbe"]["grpc"] == {"port": health}
    assert not {"livenessProbe", "startupProbe"} & container.keys()  # a standby answers at no health port
    assert container["image"] == containers_of(SETS[0])[0]["image"]
    (apart,) = servers["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert "publishNotReadyAddresses" not in found["Service-fl-server"]["spec"]
    ((secret,),) = (container["envFrom"],)
    page = (ROOT / "docs" / "availability.md").read_text()
    assert f"create secret generic {secret['secretRef']['name']}" in page
    for variable in ("FEDRING_SERVER_STATE_URL", "FEDRING_SERVER_BLOB_URL", "PGPASSWORD"):
        assert variable in page
