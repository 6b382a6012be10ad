"""Certificates: training with them, and one clean line if they do not fit."""

from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.cloud.operator_calls import CloudOperator
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.errors import SocflowerError
from socflower.wire.certificates import write_certificates
from socflower.wire.secure_channel import Tls
from tests.edgecloud.cloud.local import Cloud, train
from tests.edgecloud.runtime.numpy_halves import OPERATOR, Front, connect
from tests.one_line import refused


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    own = write_certificates(ours, ["127.0.0.1", "other.example"])
    return {
        "own": own["127.0.0.1"],
        "other": own["other.example"],
        "stranger": write_certificates(theirs, ["127.0.0.1"])["127.0.0.1"],
    }


def shown(certificate: Any, **options: Any) -> Tls:
    return Tls(certificate=certificate.certificate, key=certificate.key, **options)


def test_with_certificates_on_both_sides_training_is_as_without(
    certificates: dict[str, Any],
) -> None:
    own = certificates["own"]
    both = shown(own, ca=own.ca)
    with Cloud(tls=both) as cloud:
        cloud.operator = CloudOperator(address=cloud.service.address, token=OPERATOR, tls=both)
        cloud.open()
        front, without = Front(), Tls(ca=own.ca)
        train(cloud.port, front, 5, tls=both)
        assert cloud.trained(front, 5)
        # TLS 1.3 tells an edge without a certificate late, if at all.
        refused(
            lambda: train(cloud.port, Front(), 5, tls=without, give_up_s=0.5),
            error=SocflowerError,
        )


@pytest.mark.parametrize(("served", "trusted"), [("own", "stranger"), ("other", "own")])
def test_certificates_that_do_not_fit_are_refused_at_once(
    certificates: dict[str, Any], served: str, trusted: str
) -> None:
    tls = Tls(ca=certificates[trusted].ca)
    with Cloud(tls=shown(certificates[served])) as cloud:
        refused(lambda: train(cloud.port, Front(), 5, tls=tls), "certificates", error=SplitRefused)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "ca.pem"
    junk.write_text("nothing")
    refused(lambda: connect(1, tls=Tls(ca=junk)), "ca.pem", "PEM")
    refused(lambda: connect(1, tls=Tls(ca=tmp_path / "missing.pem")), "missing.pem", "read")
    refused(lambda: Tls(certificate=junk), "key")
    refused(lambda: Cloud(tls=Tls()), "certificate", "key")
