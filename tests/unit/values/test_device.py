import pickle

import numpy as np
import pytest

from crossdevice import Device
from crossdevice.errors import DeviceError
from crossdevice.values.device import device_of, misplaced

SAME_AS_CPU_1 = (
    "cpu:1",
    "CPU:1",
    "/cpu:1",
    "/device:CPU:1",
    "device:cpu:1",
    "//cpu:1/",
    "/cpu:001",
    "CPU:1 ",
    "/job:localhost/replica:0/task:0/device:CPU:1",
    "/device:CPU:1/task:0/job:localhost",
)


@pytest.mark.parametrize("name", SAME_AS_CPU_1)
def test_all_spellings_of_a_device_are_equal(name):
    device = Device.parse(name)
    assert device == Device("cpu", 1)
    assert hash(device) == hash(Device("cpu", 1))
    assert device.canonical == "/job:localhost/replica:0/task:0/device:CPU:1"
    assert device.canonical_without_job_and_task == "/replica:0/device:CPU:1"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gpu", "cuda:0"),
        ("/gpu:2", "cuda:2"),
        ("cuda:2", "cuda:2"),
        ("/device:GPU:2", "cuda:2"),
        ("/tpu:7", "tpu:7"),
        ("mps", "mps:0"),
        ("", "cpu:0"),
        (None, "cpu:0"),
        ("/cpu:*", "cpu:0"),
        ("/cpu:-1", "cpu:-1"),
        ("/job:w/task:3", "/job:w/replica:0/task:3/device:CPU:0"),
        ("/device:FPGA:1", "fpga:1"),
    ],
)
def test_what_a_name_lacks_comes_from_the_first_host_device(name, short):
    assert str(Device.parse(name)) == short


def test_what_a_name_lacks_comes_from_the_default_first():
    assert str(Device.parse("", default="cpu:2")) == "cpu:2"
    assert str(Device.parse("gpu", default="cpu:2")) == "cuda:2"
    assert Device.parse("cpu:1", default="/job:w/task:3").canonical == "/job:w/replica:0/task:3/device:CPU:1"


@pytest.mark.parametrize(
    "name",
    [
        "foo",
        " cpu:0",
        "/device:CPU",
        "/cpu:0/gpu:1",
        "cpu:1:2",
        "cpu:x",
        "/task:x",
        "/device:Foo:1",
        3,
        1.5,
        -1,
        True,
    ],
)
def test_names_that_cannot_be_read_are_refused(name):
    with pytest.raises(DeviceError) as refusal:
        Device.parse(name)
    assert isinstance(refusal.value, ValueError)
    assert repr(name) in str(refusal.value)


def test_a_device_is_its_own_name_and_prints_it():
    device = Device("cuda", 3)
    assert Device.parse(device) is device
    assert Device.parse(str(device)) == device
    assert repr(device) == "Device('cuda:3')"
    assert Device.parse(device.canonical) == device


class LikeJax:
    platform, id = "gpu", 2


class LikeTensorFlow:
    name, device_type = "/device:CPU:4", "CPU"


class LikeCupy:
    id = 5


@pytest.mark.parametrize(
    ("found", "short"), [(LikeJax(), "cuda:2"), (LikeTensorFlow(), "cpu:4"), (LikeCupy(), "cuda:5")]
)
def test_device_objects_of_libraries_are_read(found, short):
    assert str(Device.parse(found)) == short


def test_host_arrays_have_no_device_of_their_own():
    assert device_of(np.zeros(1)) is None
    assert device_of(1.5) is None


def test_tensors_on_the_host_have_no_device_of_their_own():
    torch = pytest.importorskip("torch")
    assert device_of(torch.zeros(1)) is None
    assert device_of(torch.zeros(1, device="meta")) == Device("meta", 0)


@pytest.mark.parametrize("name", [*SAME_AS_CPU_1, "cuda:1", "gpu", "/device:GPU:2", "/job:w/task:3", "mps"])
def test_the_constructor_reads_whole_names(name):
    assert Device(name) == Device.parse(name)
    assert Device(name).type in ("cpu", "cuda", "mps")


def test_the_constructor_knows_the_other_names_of_a_type():
    assert Device("GPU", 1) == Device("cuda", 1)
    assert Device("cuda", np.int64(1)) == Device("cuda:1")
    assert type(Device("cuda", np.int64(1)).index) is int


@pytest.mark.parametrize(
    "device",
    [
        Device("cuda", 1),
        Device("cpu"),
        Device("mps"),
        Device("fpga", 3),
        Device("meta", 2, job="worker", task=3),
        Device("cpu", 1, job="worker", replica=2, task=3),
        Device.parse("/cpu:-1"),
        Device.parse("/device:FPGA:1"),
    ],
    ids=str,
)
def test_a_device_is_what_its_repr_and_its_pickle_say(device):
    for again in (eval(repr(device), {"Device": Device}), pickle.loads(pickle.dumps(device))):
        assert again == device
        assert hash(again) == hash(device)


@pytest.mark.parametrize(
    "given",
    [
        (None,),
        ("",),
        (3,),
        (1.5,),
        (-1,),
        (True,),
        (np.float32(1),),
        (b"cpu",),
        (["cpu"],),
        ("cuda", -1),
        ("cuda", 1.0),
        ("cuda", np.float64(1)),
        ("cuda", np.int64(-1)),
        ("cuda", True),
        ("cuda", "1"),
        ("cuda", None),
        ("cuda:-1",),
        ("cuda:1.5",),
        ("cuda:1", 2),
        ("nonsense:1",),
        (" cpu",),
        ("cpu", 0, ""),
        ("cpu", 0, "a/b"),
        ("cpu", 0, "worker", -1),
        ("cpu", 0, "worker", 0, 0.5),
    ],
    ids=repr,
)
def test_the_constructor_refuses_what_is_no_device(given):
    with pytest.raises(DeviceError) as refusal:
        Device(*given)
    assert isinstance(refusal.value, ValueError)


class OnSecondGpu:
    device = "cuda:1"


@pytest.mark.parametrize(
    ("array", "device", "elsewhere"),
    [
        (np.zeros(1), "cpu:0", None),
        (np.zeros(1), "cpu:7", None),
        (np.zeros(1), "cuda:1", "the host"),
        (1.5, "mps:0", "the host"),
        (OnSecondGpu(), "cuda:1", None),
        (OnSecondGpu(), "cuda:0", "cuda:1"),
        (OnSecondGpu(), "cpu:1", "cuda:1"),
    ],
)
def test_arrays_that_are_elsewhere_are_found(array, device, elsewhere):
    assert misplaced(array, Device(device)) == elsewhere


def test_a_device_is_the_string_of_its_full_name():
    device = Device("cuda", 3)
    assert device == device.canonical == "/job:localhost/replica:0/task:0/device:GPU:3"
    assert device.canonical in {device: 1}
    assert "/job:localhost/replica:0/task:0/device:GPU:3" in (Device("cpu"), device)
    assert type(device.canonical) is str
    assert device != "cuda:3"
    assert (f"{device}", f"{device:>7}", "%s" % device, f"{[device]}") == (  # noqa: UP031
        "cuda:3",
        " cuda:3",
        "cuda:3",
        "[Device('cuda:3')]",
    )
    with pytest.raises(AttributeError, match="index of a device cannot be set"):
        device.index = 2
    with pytest.raises(AttributeError):
        device.other = 2
