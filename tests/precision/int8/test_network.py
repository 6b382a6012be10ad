"""Graphs: what they refuse, ReLU fusion, and their JSON."""

import json

import pytest

from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import capture_network
from tests.one_line import refused
from tests.precision.networks import IMAGE, NETWORKS, REACH, build

S = (4, 2, 2)


def convolution(name, x="input", **more):
    return ir.Convolution(name=name, inputs=(x,), shape=S, kernel=(1, 1), **more)


def relu(name, x):
    return ir.Relu(name=name, inputs=(x,), shape=S)


def graph(*nodes):
    return ir.Graph(input_shape=S, nodes=nodes)


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_json_round_trip_is_the_identity(name):
    original = capture_network(build(name), IMAGE).graph
    assert ir.Graph.from_json(json.loads(json.dumps(original.to_json()))) == original


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([], ["no operator"]),
        ([convolution("a", "b"), convolution("b")], ["a reads 'b'"]),
        ([convolution("a"), convolution("a")], ["a: runs twice"]),
        ([convolution("input")], ["input: runs twice"]),
        ([convolution("a"), convolution("b"), convolution("c")], ["nothing reads", "a, b"]),
        ([convolution("a", padding=(1, 0))], ["a does not make", "(4, 2, 2)"]),
        ([ir.Relu(name="a", inputs=("input",), shape=(4, 1, 1))], ["a does not make", "(4, 1, 1)"]),
        ([ir.Dropout(name="a", inputs=("input",), shape=S, p=1.5)], ["a has p = 1.5"]),
    ],
)
def test_a_graph_refuses_what_cannot_run(nodes, named):
    refused(lambda: graph(*nodes), *named)


@pytest.mark.parametrize("changes", [{"kind": "quantum"}, {"kind": None}, {"colour": 3}])
def test_unknown_json_is_refused(changes):
    document = graph(convolution("a")).to_json()
    document["nodes"][0].update(changes)
    refused(lambda: ir.Graph.from_json(document), "unknown operator", changes.get("kind", "colour"))


def test_a_relu_is_fused_into_the_operator_that_only_it_reads():
    for before in (
        convolution("a"),
        ir.BatchNorm(name="a", inputs=("input",), shape=S, eps=1e-5, momentum=0.1),
        ir.Add(name="a", inputs=("input", "input"), shape=S),
    ):
        fused = ir.fuse_relu(graph(before, relu("r", "a"), convolution("b", "r")))
        assert [node.name for node in fused.nodes] == ["a", "b"]
        assert fused.node("a").relu
        assert fused.node("b").inputs == ("a",)


def test_a_relu_stays_where_its_input_is_read_elsewhere_too_or_is_no_sum():
    shared = graph(convolution("a"), relu("r", "a"), ir.Add(name="s", inputs=("a", "r"), shape=S))
    assert ir.fuse_relu(shared) == shared
    pool = ir.MaxPool(name="p", inputs=("input",), shape=S, kernel=(1, 1), stride=(1, 1))
    assert ir.fuse_relu(graph(pool, relu("r", "p"))) == graph(pool, relu("r", "p"))
    assert ir.fuse_relu(graph(relu("r", "input"))) == graph(relu("r", "input"))


def test_a_second_relu_is_not_fused_twice():
    fused = ir.fuse_relu(
        graph(convolution("a"), relu("r", "a"), relu("t", "r"), convolution("b", "t"))
    )
    assert [node.name for node in fused.nodes] == ["a", "t", "b"]
    assert fused.node("t").inputs == ("a",)


def test_readers_are_listed_once_per_reading():
    both = graph(convolution("a"), ir.Add(name="s", inputs=("a", "a"), shape=S))
    assert [node.name for node in both.consumers("a")] == ["s", "s"]
    assert both.shape_of("input") == S
    assert both.output == "s"
    assert both.num_classes == 4
