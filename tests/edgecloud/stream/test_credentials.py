"""Certificates: training with them, and one clean line where they do not fit."""

from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, fetch_weights, open_session
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.errors import ConfigError
from socflower.wire.certificates import write_certificates
from socflower.wire.frame_channel import StreamLost
from socflower.wire.secure_channel import Tls
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Front,
    connect,
    local_training,
    make_half,
    same,
)

PLAN = FrontPlan(split_plan=SplitPlan(cut=1))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    own = write_certificates(ours, ["127.0.0.1", "other.example"])
    return {
        "own": own["127.0.0.1"],
        "other": own["other.example"],
        "stranger": write_certificates(theirs, ["127.0.0.1"])["127.0.0.1"],
    }


def serve_tls(certificate: Any, *, mutual: bool = False) -> CloudService:
    return CloudService(
        "127.0.0.1:0",
        make_half,
        operator_token=OPERATOR,
        log=lambda line: None,
        tls=Tls(
            ca=certificate.ca if mutual else None,
            certificate=certificate.certificate,
            key=certificate.key,
        ),
    )


def test_with_certificates_on_both_sides_training_goes_on_as_without(
    certificates: dict[str, Any],
) -> None:
    own = certificates["own"]
    tls = Tls(ca=own.ca, certificate=own.certificate, key=own.key)
    service = serve_tls(own, mutual=True)
    try:
        operator = CloudOperator(address=service.address, token=OPERATOR, tls=tls)
        open_session(operator, run_id="run", fingerprint=FINGERPRINT)
        front = Front()
        train_front(
            connect(service.port, tls=tls), front, BatchSpan(first_batch=0, num_batches=5), PLAN
        )
        assert same(front.weights(), fetch_weights(operator, "run")[1], wanted=local_training(5))
        with pytest.raises(
            (SplitRefused, StreamLost)
        ) as failed:  # TLS 1.3 tells an edge without one late, if at all
            train_front(
                connect(service.port, tls=Tls(ca=own.ca), give_up_s=0.5),
                Front(),
                BatchSpan(first_batch=0, num_batches=5),
                PLAN,
            )
        assert "\n" not in str(failed.value)
    finally:
        service.close()


@pytest.mark.parametrize(("served", "trusted"), [("own", "stranger"), ("other", "own")])
def test_certificates_that_do_not_fit_are_refused_at_once(
    certificates: dict[str, Any],
    served: str,
    trusted: str,
) -> None:
    service = serve_tls(certificates[served])
    try:
        with pytest.raises(SplitRefused, match="the certificates do not fit") as refused:
            train_front(
                connect(service.port, tls=Tls(ca=certificates[trusted].ca), give_up_s=60.0),
                Front(),
                BatchSpan(first_batch=0, num_batches=5),
                PLAN,
            )
        assert "\n" not in str(refused.value)
    finally:
        service.close()


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca .* is no PEM file"):
        connect(1, tls=Tls(ca=tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="cannot be read"):
        connect(1, tls=Tls(ca=tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="needs its key"):
        Tls(certificate=tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match="needs a certificate and a key"):
        CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR, tls=Tls())
