"""What launchers say is read, and what does not fit together is refused by name."""

import json

import pytest

from crossdevice.errors import OptionError
from crossdevice.process_groups.cluster import cluster_from_env
from crossdevice.values.launchers import first_host, slurm_counts

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
RUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4711",
    "CROSSDEVICE_RUN_FOLDER": "/tmp/c",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "prterun-alpha-7@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_ID": "4711",
}


def tf_config(job="worker", index=1, **cluster_of_jobs):
    jobs = cluster_of_jobs or {"chief": ["alpha:2222"], "worker": ["alpha:2223", "beta:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})}


def place(found):
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size, found.address


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("nothing", 0, 1, 0, 1, None)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, "alpha")),
        ({**RUN, "LOCAL_RANK": "1"}, ("crossdevice run", 1, 2, 1, 2, "127.0.0.1")),
        ({**TORCHRUN, "CROSSDEVICE_RUN_FOLDER": "/tmp/c"}, ("torchrun", 5, 8, 1, 4, "alpha")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("environment", 0, 1, None, None, None)),
        (tf_config("chief", 0), ("TF_CONFIG", 0, 3, 0, 2, "alpha")),
        (tf_config("worker", 0), ("TF_CONFIG", 1, 3, 1, 2, "alpha")),
        (tf_config("worker", 1), ("TF_CONFIG", 2, 3, 0, 1, "alpha")),
        (tf_config("worker", 0, worker=["beta:1"], ps=["alpha:1"]), ("TF_CONFIG", 0, 1, 0, 1, "beta")),
        (OPEN_MPI, ("Open MPI", 2, 4, 0, 2, None)),
        ({**OPEN_MPI, "MASTER_ADDR": "alpha"}, ("Open MPI", 2, 4, 0, 2, "alpha")),
        (MPICH, ("PMI", 1, 2, 1, 2, "127.0.0.1")),
        (SLURM, ("Slurm", 3, 5, 1, 2, "gpu07")),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, ("nothing", 0, 1, 0, 1, None)),
        ({"TF_CONFIG": "{}"}, ("nothing", 0, 1, 0, 1, None)),
    ],
)
def test_launchers_are_read(environ, expected):
    assert place(cluster_from_env(environ)) == expected


@pytest.mark.parametrize(
    ("outer", "inner", "launcher"),
    [
        (SLURM, TORCHRUN, "torchrun"),
        (OPEN_MPI, TORCHRUN, "torchrun"),
        (SLURM, OPEN_MPI, "Open MPI"),
        (SLURM, MPICH, "PMI"),
        (SLURM, tf_config(), "TF_CONFIG"),
        (tf_config(), TORCHRUN, "torchrun"),
    ],
)
def test_the_inner_launcher_counts(outer, inner, launcher):
    found = cluster_from_env({**outer, **inner})
    assert found.launcher == launcher
    assert (found.rank, found.size) == (
        cluster_from_env(inner).rank,
        cluster_from_env(inner).size,
    )


def test_torchrun_keeps_the_store_and_counts_restarts():
    found = cluster_from_env(TORCHRUN)
    assert (found.port, found.has_store, found.restart) == (29400, True, 2)
    assert not cluster_from_env({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).has_store


def test_recognised_says_what_was_found_and_where():
    assert cluster_from_env({}).recognised == "nothing: one process"
    assert cluster_from_env(SLURM).recognised == (
        f"Slurm: rank 3 of 5, local rank 1 of 2, meeting at gpu07:{cluster_from_env(SLURM).port}, from "
        "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_TASKS_PER_NODE, SLURM_JOB_NODELIST, "
        "SLURM_JOB_ID"
    )


def test_ranks_of_a_job_find_the_same_port_and_other_jobs_another():
    ports = [cluster_from_env({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(5)]
    assert len(set(ports)) == 1
    assert 20000 <= ports[0] < 32000
    assert cluster_from_env({**SLURM, "SLURM_JOB_ID": "4712"}).port != ports[0]
    assert cluster_from_env({**SLURM, "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, ["RANK", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE", "rank 2 of 2"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK", "'one'"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK", "'-1'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, ["MASTER_PORT", "1 to 65535", "99999"]),
        ({**SLURM, "MASTER_PORT": "0"}, ["MASTER_PORT", "1 to 65535"]),
        ({"TF_CONFIG": "{not json"}, ["TF_CONFIG", "{not json"]),
        ({"TF_CONFIG": "[1]"}, ["TF_CONFIG", "[1]"]),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, ["TF_CONFIG"]),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, ["TF_CONFIG", "task"]),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, ["TF_CONFIG", "none"]),
        (tf_config("worker", 7), ["TF_CONFIG", "worker 7", "chief 0, worker 0, worker 1"]),
        (tf_config("ps", 0, worker=["a:1"], ps=["b:1"]), ["TF_CONFIG", "ps 0"]),
        (tf_config("worker", 0, worker=["alpha"]), ["TF_CONFIG", "host:port", "'alpha'"]),
        (tf_config("worker", 0, worker=["alpha:99999"]), ["TF_CONFIG", "host:port", "'alpha:99999'"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK", "PMI_SIZE"]),
        ({"SLURM_PROCID": "0"}, ["SLURM_PROCID", "SLURM_NTASKS"]),
        ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID", "SLURM_TASKS_PER_NODE"]),
        ({"PMIX_RANK": "0"}, ["PMIX_RANK", "OMPI_COMM_WORLD_SIZE"]),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(environ, words):
    with pytest.raises(OptionError) as refused:
        cluster_from_env(environ)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("alpha", "alpha"),
        ("node[01-03,7]", "node01"),
        ("node[7,01-03],other", "node7"),
        ("rack[1-2]n[005-9]-ib", "rack1n005-ib"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_slurm_node_lists_begin_with_their_first_host(hosts, first):
    assert first_host(hosts) == first


def test_slurm_node_lists_without_a_host_are_refused():
    with pytest.raises(OptionError, match="node list"):
        first_host(",")


def test_slurm_counts_are_repeated():
    assert slurm_counts("4,2(x3)") == [4, 2, 2, 2]
