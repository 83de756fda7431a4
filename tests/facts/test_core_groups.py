"""Groups of cores that Neuron lists: the table against the pages, placements, layouts, the search and `--cores`."""

import itertools

import numpy as np
import pytest
from planned import num_devices, small_config

from hlat_jax.config import ParallelConfig, PrecisionConfig
from hlat_jax.facts import core_groups, hardware
from hlat_jax.facts.core_groups import DISPUTED, FINE, REFUSED, RULES, Server, groups_along, verdict
from hlat_jax.host.neuron_env import environment
from hlat_jax.host.neuron_topology import Topology, checked
from hlat_jax.parallel.degrees import check_degrees, group_verdicts, layout_over, placement, sent_along, verdicts
from hlat_jax.parallel.virtual_devices import PlannedClient, PlannedDevice, planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import report, search
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program

TRN1, TRN2, LNC1 = Server("trn1", 32), Server("trn2", 64), Server("trn2-lnc1", 128)


def level(server, *groups):
    return verdict(np.asarray(groups), server)[0]


def consecutive(server, size):
    return level(server, *np.arange(server.size).reshape(-1, size))


# Source: reference page, section 4: nxd-inference feature guide, NxD's parallel_state.py, archive/nxd-training/mlp.
CONSECUTIVE = {
    TRN1: {1: FINE, 2: FINE, 4: REFUSED, 8: FINE, 16: FINE, 32: FINE},
    TRN2: {1: FINE, 2: FINE, 4: FINE, 8: DISPUTED, 16: FINE, 32: REFUSED, 64: FINE},
    LNC1: {1: FINE, 2: DISPUTED, 4: FINE, 8: FINE, 16: REFUSED, 32: FINE, 64: REFUSED, 128: FINE},
}


def test_consecutive_groups_are_judged_as_the_pages_say():
    for server, levels in CONSECUTIVE.items():
        assert {size: consecutive(server, size) for size in levels} == levels


def test_groups_of_special_order_are_listed():
    assert level(TRN1, [0, 8, 16, 24], [1, 9, 17, 25]) == FINE
    assert level(TRN1, [0, 2, 4, 6]) == level(TRN1, range(4, 12)) == DISPUTED
    assert level(TRN2, [*range(16), *range(63, 47, -1)], [*range(16, 32), *range(47, 31, -1)]) == FINE
    assert level(TRN2, [0, 4, 8, 12]) == level(TRN2, [0, 16, 32, 48]) == FINE  # 4 x 4 x 4 in parallel_state.py


def test_a_size_that_no_page_lists_is_refused_with_those_that_are():
    for server, size in ((TRN1, 3), (TRN1, 24), (TRN2, 6), (TRN2, 48)):
        found, why = verdict(np.arange(size)[None], server)
        assert found == REFUSED
        assert f"no page lists groups of {size}; sizes with a group: 1, 2, 4, 8, 16" in why


def test_groups_between_servers_need_the_same_cores_of_each():
    for group, expected in {
        (0, 32): FINE,
        (0, 33): REFUSED,
        (0, 1, 32): REFUSED,
        (0, 8, 16, 24, 32, 40, 48, 56): FINE,
        (0, 1, 2, 3, 32, 33, 34, 35): REFUSED,
    }.items():
        assert level(TRN1, group) == expected


def test_every_neuron_device_has_rules_of_groups():
    assert set(RULES) == set(hardware.NEURON_KINDS.values())
    for kind, server in (("trn1", 32), ("trn2", 64), ("trn2-lnc1", 128)):
        assert RULES[kind].server == server
        for own in RULES[kind].orders.values():
            assert sorted(itertools.chain.from_iterable(own)) == list(range(server))


def test_placement_gives_listed_groups_to_tensor_and_to_its_replicas():
    for server, tensor in ((TRN1, 4), (TRN2, 32), (LNC1, 64), (TRN1, 8)):
        devices = placement(2 * server.size, tensor=tensor, server=server)
        assert sorted(devices) == list(range(2 * server.size))
        shape = {"data": 2 * server.size // tensor, "tensor": tensor}
        for axis in shape:
            assert verdict(groups_along(shape, [axis], devices=devices), server) == (FINE, "")


def test_layout_over_neuron_devices_is_placed_and_one_over_others_is_not():
    def devices(kind, platform):
        client = PlannedClient(platform, 64)
        return [PlannedDevice(n, client, device_kind=kind, process_index=n // 32) for n in range(64)]

    config = small_config(tensor=4, data=16, rows=16)
    mesh = layout_over(config, devices("NC_v2", "neuron")).mesh
    assert [device.id for device in mesh.devices.reshape(16, 4)[0]] == [0, 8, 16, 24]
    assert [device.id for device in mesh.devices.reshape(16, 4)[8]] == [32, 40, 48, 56]
    for kind, platform in (("NC_v2", "cpu"), ("NC_v9", "neuron"), ("planned", "neuron")):
        mesh = layout_over(config, devices(kind, platform)).mesh
        assert [device.id for device in mesh.devices.reshape(16, 4)[0]] == [0, 1, 2, 3]


def test_layout_whose_groups_are_not_listed_is_refused_with_the_nearest_that_is():
    config = small_config(tensor=1, data=4)
    message = (
        r"parallel.data=4: 4 cores \[0, 1, 2, 3\]: groups of 4 work in an order of their own, such as \[0, 8, 16, 24\]"
        r".* on trn1. Source: nxd-inference feature guide"
    )
    with pytest.raises(ValueError, match=message):
        planned_layout(config, 4, platform="neuron", server=Server("trn1", 4))
    assert planned_layout(config, 4, platform="neuron").degrees["data"] == 4
    assert planned_layout(config, 4, platform="neuron", server=Server("trn2", 4)).degrees["data"] == 4


def test_the_group_of_the_norms_is_checked():
    """Their all-reduce goes over every axis that splits the state: cores 0 to 3 here. Generation has no norms."""
    degrees = {"data": 8, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match=r"parallel.fsdp=2 x parallel.tensor=2: 4 cores \[0, 1, 2, 3\]"):
        check_degrees(small_config(rows=16, **degrees), 32, server=TRN1)
    for trains, refused in ((True, 1), (False, 0)):
        found = group_verdicts(ParallelConfig(**degrees), num_kv_heads=4, server=TRN1, trains=trains)
        assert len(found[REFUSED]) == refused


SENT = [
    {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 8, "sequence_parallel": True},
    {"pipe": 2, "data": 2, "zero1": True, "pipe_exchange": "all_gather"},
    {"data": 2, "tensor": 8, "zero1": True, "reduce_gradients": "layer"},
]


def test_the_groups_that_are_checked_are_those_that_a_run_sends():
    for changes in SENT:
        config = small_config(rows=8, m=2, **changes)
        layout = planned_layout(config, num_devices(config), platform="neuron")
        program = make_program(config, layout)
        traced = [program.trace_step(), program.norms.trace(program.abstract_state)]
        sent = {one.axes for trace in traced for one in traced_collectives(live_jaxpr(trace), layout.mesh)}
        assert sent == set(sent_along(layout)), changes


def test_copies_of_kv_heads_of_70b_are_in_the_groups_of_4_that_work():
    """TP 32 with 8 KV heads: cores 0, 8, 16, 24 have the same KV head."""
    parallel = ParallelConfig(pipe=8, data=32, tensor=32, zero1=True)
    assert group_verdicts(parallel, num_kv_heads=8, server=TRN1) == {DISPUTED: [], REFUSED: []}
    config = small_config(tensor=8, fuse=False)
    layout = planned_layout(config, 8, platform="neuron")
    assert layout.mesh.shape["tensor_rep"] == 2
    assert [device.id for device in layout.mesh.devices.reshape(2, 4)[:, 0]] == [0, 4]


def test_search_leaves_out_refused_layouts_and_ranks_disputed_ones_last():
    config, site = small_config(rows=32, policy="mixed"), Site("trn1.32xlarge", 1)
    tried = [candidate for _, candidate in search.candidates(config, site)]
    for c in tried:
        assert not verdicts(c, 32, site.server)[REFUSED]
    assert {c.parallel.tensor for c in tried} == {1, 2, 4, 8}


def test_plan_names_disputed_groups():
    config = small_config(tensor=8, data=8, fuse=False)
    plan = make_plan(config, Site("trn2.48xlarge", 1))
    assert any(words.startswith("parallel.tensor=8: 8 cores") for words in plan["disputed_groups"])
    assert "disputed: parallel.tensor=8: 8 cores" in report.as_text(plan)


# (instance, LNC) -> the numbers of cores that are listed, and those of them that no page lists for a job
CORES = {
    ("trn1.32xlarge", 1): ({1, 2, 8, 16, 32}, {16}),
    ("trn1.2xlarge", 1): ({1, 2}, set()),
    ("trn2.3xlarge", 2): ({1, 2, 4}, {2}),
    ("trn2.48xlarge", 2): ({1, 2, 4, 8, 16, 64}, {2, 8}),
    ("trn2.48xlarge", 1): ({1, 2, 4, 8, 32, 128}, {2}),
}


def test_cores_are_those_of_a_listed_group_and_jobs_of_other_listed_degrees_are_disputed():
    for (instance, lnc), (listed, disputed) in CORES.items():
        whole = hardware.INSTANCES[instance].num_devices(lnc=lnc)
        for count in sorted(listed | {3, 12, whole // 2 + 1} & set(range(whole))):
            topology = Topology(instance, cores=count, lnc=lnc)
            if count not in listed:
                with pytest.raises(ValueError, match=rf"--cores={count}: {count} cores \[0, 1"):
                    checked(topology)
                continue
            assert checked(topology).cores == count
            notes = environment(PrecisionConfig(), ParallelConfig(), topology, current={}).notes
            is_disputed = any(f"--cores={count} is disputed: {count} cores" in note for note in notes)
            assert is_disputed == (count in disputed), (instance, count)


def test_abstract_degrees_and_devices_agree_on_the_groups():
    """The check by degrees judges the groups of the mesh that the layout builds."""
    config = small_config(tensor=4, data=8, rows=8)
    layout = planned_layout(config, 32, platform="neuron", server=TRN1)
    ids = np.vectorize(lambda device: device.id)(layout.mesh.devices)
    assert (ids.reshape(-1) == placement(32, tensor=4, server=TRN1)).all()
    assert ParallelConfig().zero1 is False
    assert core_groups.server_of(list(layout.mesh.devices.flat)) is None  # virtual: no kind of their own
