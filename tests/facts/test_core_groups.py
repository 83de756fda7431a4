"""Groups of cores that Neuron lists: the table against the pages, placements, layouts, the search and `--cores`."""

import dataclasses

import numpy as np
import pytest
from planned import num_devices, small_config
from refusals import assert_names

from hlat_jax.config import ModelConfig, ParallelConfig, PrecisionConfig
from hlat_jax.facts import hardware
from hlat_jax.facts.core_groups import DISPUTED, FINE, REFUSED, Server, groups_along, verdict
from hlat_jax.host.neuron_env import environment
from hlat_jax.host.neuron_topology import Topology, resolve_topology
from hlat_jax.parallel.degrees import check_degrees, collective_axes, group_verdicts, layout_over, placement, verdicts
from hlat_jax.parallel.virtual_devices import PlannedClient, PlannedDevice, planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import search
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.plan.report import Site
from hlat_jax.program import make_program

TRN1, TRN2, LNC1 = Server("trn1", 32), Server("trn2", 64), Server("trn2-lnc1", 128)


def level(server, *groups):
    return verdict(np.asarray(groups), server)[0]


# Source: reference page, section 4: nxd-inference feature guide, NxD's parallel_state.py, archive/nxd-training/mlp.
CONSECUTIVE = {
    TRN1: {1: FINE, 2: FINE, 4: REFUSED, 8: FINE, 16: FINE, 32: FINE},
    TRN2: {1: FINE, 2: FINE, 4: FINE, 8: FINE, 16: FINE, 32: REFUSED, 64: FINE},
    LNC1: {1: FINE, 2: DISPUTED, 4: FINE, 8: FINE, 16: REFUSED, 32: FINE, 64: REFUSED, 128: FINE},
}


def test_consecutive_groups_are_judged_as_the_pages_say():
    for server, levels in CONSECUTIVE.items():
        numbers = np.arange(server.size)
        assert {size: level(server, *numbers.reshape(-1, size)) for size in levels} == levels
    for server, size in ((TRN1, 3), (TRN1, 24), (TRN2, 6), (TRN2, 48)):
        found, why = verdict(np.arange(size)[None], server)
        assert found == REFUSED
        assert_names(why, f"groups of {size};", "1, 2, 4, 8, 16")


def test_groups_of_special_order_are_listed():
    assert level(TRN1, [0, 8, 16, 24], [1, 9, 17, 25]) == FINE
    assert level(TRN1, [0, 2, 4, 6]) == level(TRN1, range(4, 12)) == DISPUTED
    assert level(TRN2, [*range(16), *range(63, 47, -1)], [*range(16, 32), *range(47, 31, -1)]) == FINE
    assert level(TRN2, [0, 4, 8, 12]) == level(TRN2, [0, 16, 32, 48]) == FINE  # 4 x 4 x 4 in parallel_state.py


def test_worlds_that_others_ran_are_not_refused():
    """Source: foxl-ai/kiln, Collectives on trn2 and across chips, 3 October 2026: sums were right; 4 of trn1 failed."""
    for kind, levels in {
        "trn1": {2: FINE, 4: REFUSED, 8: FINE, 16: FINE, 32: FINE},
        "trn2": {2: FINE, 4: FINE, 8: FINE, 16: FINE, 32: FINE, 48: REFUSED, 64: FINE},
    }.items():
        assert {count: level(Server(kind, count), range(count)) for count in levels} == levels
    # seen alone, not as one of two groups, and not as the replicas beside degree 8
    assert level(TRN2, range(32), range(32, 64)) == REFUSED
    assert level(TRN2, range(0, 64, 8)) == DISPUTED


def test_all_to_all_over_every_eighth_core_of_trn1_is_refused():
    """Source: aws-samples/sample-spectral-dns-on-aws-neuron, rule 5, on trn1.32xlarge."""
    strided, whole = np.asarray([[0, 8, 16, 24]]), np.arange(32)[None]
    assert verdict(strided, TRN1) == (FINE, "")
    assert verdict(whole, TRN1, all_to_all=True) == (FINE, "")
    found, why = verdict(strided, TRN1, all_to_all=True)
    assert (found, "0, 8, 16, 24" in why) == (REFUSED, True)
    assert verdict(np.asarray([[0, 16, 32, 48]]), TRN2, all_to_all=True) == (FINE, "")  # nobody has tried


def test_groups_between_servers_need_the_same_cores_of_each():
    for group, expected in {
        (0, 32): FINE,
        (0, 33): REFUSED,
        (0, 1, 32): REFUSED,
        (0, 8, 16, 24, 32, 40, 48, 56): FINE,
        (0, 1, 2, 3, 32, 33, 34, 35): REFUSED,
    }.items():
        assert level(TRN1, group) == expected


def test_placement_gives_listed_groups_to_tensor_and_to_its_replicas():
    for server, tensor in ((TRN1, 4), (TRN2, 32), (LNC1, 64), (TRN1, 8)):
        devices = placement(2 * server.size, tensor=tensor, server=server)
        assert sorted(devices) == list(range(2 * server.size))
        shape = {"data": 2 * server.size // tensor, "tensor": tensor}
        for axis in shape:
            assert verdict(groups_along(shape, [axis], devices=devices), server) == (FINE, "")


def test_layout_over_neuron_devices_is_placed_and_one_over_others_is_not():
    config = small_config(tensor=4, data=16, rows=16)
    for kind, platform, first in (("NC_v2", "neuron", [0, 8, 16, 24]), ("NC_v2", "cpu", [0, 1, 2, 3])):
        client = PlannedClient(platform, 64)
        devices = [PlannedDevice(n, client, device_kind=kind, process_index=n // 32) for n in range(64)]
        mesh = layout_over(config, devices).mesh
        assert [device.id for device in mesh.devices.reshape(16, 4)[0]] == first


def test_the_group_of_the_norms_is_checked():
    """Their all-reduce goes over every axis that splits the state: cores 0 to 3 here. Generation has no norms."""
    degrees = {"data": 8, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match=r"^parallel.fsdp=2 x parallel.tensor=2"):
        check_degrees(small_config(rows=16, **degrees), 32, server=TRN1)
    for trains, num_refused in ((True, 1), (False, 0)):
        found = group_verdicts(ParallelConfig(**degrees), model=ModelConfig(num_kv_heads=4), server=TRN1, trains=trains)
        assert len(found[REFUSED]) == num_refused


@pytest.mark.slow
def test_the_groups_that_are_checked_are_those_that_a_run_sends():
    for changes, model in (
        ({"pipe": 2, "data": 2, "fsdp": 2, "tensor": 8, "sequence_parallel": True}, {}),
        ({"data": 2, "tensor": 8, "zero1": True}, {}),
        ({"data": 2, "fsdp": 2, "tensor": 8}, {"qkv_bias": True}),
        ({"pipe": 2, "data": 2, "tensor": 8}, {"qk_norm": True}),
    ):
        config = small_config(rows=8, m=2, **changes)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        layout = planned_layout(config, num_devices(config), platform="neuron")
        program = make_program(config, layout)
        traced = [program.trace_step(), program.norms.trace(program.abstract_state)]
        sent = {one.axes for trace in traced for one in traced_collectives(live_jaxpr(trace), layout.mesh)}
        assert sent == set(collective_axes(layout, config.model)), changes


def test_search_leaves_out_refused_layouts():
    config, site = small_config(rows=32, policy="mixed"), Site("trn1.32xlarge", 1)
    tried = [candidate for _, candidate in search.candidates(config, site)]
    assert {c.parallel.tensor for c in tried} == {1, 2, 4, 8}
    assert not any(verdicts(c, 32, site.server)[REFUSED] for c in tried)


# (instance, LNC) -> the numbers of cores that are listed, and those that are disputed
CORES = {
    ("trn1.32xlarge", 1): ({1, 2, 8, 16, 32}, set()),
    ("trn2.3xlarge", 2): ({1, 2, 4}, set()),
    ("trn2.48xlarge", 2): ({1, 2, 4, 8, 16, 32, 64}, set()),
    ("trn2.48xlarge", 1): ({1, 2, 4, 8, 32, 128}, {2}),
}


def test_cores_are_those_of_a_listed_group():
    for (instance, lnc), (listed, disputed) in CORES.items():
        whole = hardware.INSTANCES[instance].num_devices(lnc=lnc)
        for count in sorted(listed | {3, 12, whole // 2 + 1} & set(range(whole))):
            topology = Topology(instance, cores=count, lnc=lnc)
            if count not in listed:
                with pytest.raises(ValueError, match=f"^--cores={count}"):
                    resolve_topology(topology)
                continue
            assert resolve_topology(topology).cores == count
            notes = environment(PrecisionConfig(), ParallelConfig(), topology, current={}).notes
            is_disputed = any(f"--cores={count} " in note for note in notes)
            assert is_disputed == (count in disputed), (instance, count)
