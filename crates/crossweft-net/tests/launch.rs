//! Joining with nothing but a launcher's environment.
#![allow(clippy::unwrap_used, reason = "a test says best where it failed")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{rendezvous, soon};
use crossweft_net::launch::{Job, Launcher};
use crossweft_net::{Cancel, Group, JoinOptions, NetError, RendezvousOptions, UniqueId};

fn torchrun(rank: u32, size: u32, run: &str, more: &[(&str, String)]) -> Job {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "localhost".to_owned()),
        ("MASTER_PORT", "29500".to_owned()),
        // Tests run at the same time, also of other checkouts.
        (
            "TORCHELASTIC_RUN_ID",
            format!("{run}-{}", std::process::id()),
        ),
    ];
    let lookup = |name: &str| {
        let found = variables.iter().chain(more).find(|(key, _)| *key == name);
        found.map(|(_, value)| value.clone())
    };
    let job = Job::detect(&lookup).unwrap().unwrap();
    assert_eq!(job.launcher, Launcher::Torchrun);
    job
}

fn join(job: &Job) -> Result<Group, NetError> {
    let options = JoinOptions {
        timeout: Duration::from_secs(10),
        ..Default::default()
    };
    job.join(&options, &RendezvousOptions::default())
}

fn everybody(size: u32, job: impl Fn(u32) -> Job + Sync, groups: u32) {
    std::thread::scope(|scope| {
        for rank in 0..size {
            let job = &job;
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(u64::from(size - rank) * 30));
                for _ in 0..groups {
                    let group = join(&job(rank)).unwrap();
                    assert_eq!((group.rank(), group.world_size()), (rank, size));
                    group.barrier(soon()).unwrap();
                }
            });
        }
    });
}

#[test]
fn on_one_host_a_unix_socket_passes_the_id_and_again_for_the_next_group() {
    everybody(4, |rank| torchrun(rank, 4, "socket", &[]), 3);
}

#[test]
fn a_file_passes_the_id_and_is_gone_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    let file = [("CROSSWEFT_ID_FILE", path.display().to_string())];
    everybody(3, |rank| torchrun(rank, 3, "file", &file), 3);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_stale_file_is_waited_out_and_an_open_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    let file = [("CROSSWEFT_ID_FILE", path.display().to_string())];
    let dead = rendezvous().unique_id();
    write_private(&path, &dead);
    everybody(2, |rank| torchrun(rank, 2, "stale", &file), 1);

    write_private(&path, &dead);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let error = join(&torchrun(1, 2, "open", &file)).unwrap_err();
    assert!(matches!(error, NetError::IdFile { .. }), "{error}");
    assert!(error.to_string().contains("644"), "{error}");
}

/// The port of a rank 0 that was killed may belong to any server by now.
#[test]
fn a_stale_file_that_leads_to_a_silent_server_is_waited_out_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    let file = [("CROSSWEFT_ID_FILE", path.display().to_string())];
    // Accepts nothing, so connections wait in its backlog.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    write_private(
        &path,
        &UniqueId::generate(silent.local_addr().unwrap()).unwrap(),
    );
    let options = JoinOptions {
        timeout: Duration::from_millis(200),
        ..Default::default()
    };
    let job = torchrun(1, 2, "silent", &file);
    let error = job
        .join(&options, &RendezvousOptions::default())
        .unwrap_err();
    assert!(matches!(error, NetError::IdFile { .. }), "{error}");
    assert!(error.to_string().contains("did not prove"), "{error}");
    everybody(2, |rank| torchrun(rank, 2, "silent", &file), 1);
}

fn write_private(path: &Path, id: &UniqueId) {
    std::fs::write(path, id.to_string()).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

#[test]
fn a_given_id_is_served_by_rank_0_or_by_crossweft() {
    // A free port: bound once, then let go.
    let address = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let id = UniqueId::generate(address).unwrap();
    let given = [("CROSSWEFT_UNIQUE_ID", id.to_string())];
    everybody(3, |rank| torchrun(rank, 3, "given", &given), 1);

    let spawner = rendezvous();
    let id = spawner.unique_id().to_string();
    let job = |rank: u32| {
        let lookup = |name: &str| match name {
            "CROSSWEFT_RANK" => Some(rank.to_string()),
            "CROSSWEFT_WORLD_SIZE" => Some("3".to_owned()),
            "CROSSWEFT_UNIQUE_ID" => Some(id.clone()),
            _ => None,
        };
        Job::detect(&lookup).unwrap().unwrap()
    };
    everybody(3, job, 1);
    spawner.wait().unwrap();
}

#[test]
fn without_rank_0_the_wait_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    let file = [("CROSSWEFT_ID_FILE", path.display().to_string())];
    let address = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let given = [(
        "CROSSWEFT_UNIQUE_ID",
        UniqueId::generate(address).unwrap().to_string(),
    )];
    for more in [&[][..], &file, &given] {
        let options = JoinOptions {
            timeout: Duration::from_millis(300),
            ..Default::default()
        };
        let started = Instant::now();
        let job = torchrun(1, 2, "absent", more);
        let error = job
            .join(&options, &RendezvousOptions::default())
            .unwrap_err();
        assert!(
            matches!(
                error,
                NetError::Timeout { .. } | NetError::IdFile { .. } | NetError::RootLost { .. }
            ),
            "{error}"
        );
        assert!(started.elapsed() < Duration::from_secs(3));
    }
}

#[test]
fn waiting_for_rank_0_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    let file = [("CROSSWEFT_ID_FILE", path.display().to_string())];
    // Accepts nothing, so connections wait in its backlog.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::generate(silent.local_addr().unwrap()).unwrap();
    let given = [("CROSSWEFT_UNIQUE_ID", id.to_string())];
    for more in [&[][..], &file, &given] {
        let cancel = Cancel::new().unwrap();
        let options = JoinOptions {
            cancel: Some(cancel.clone()),
            ..Default::default()
        };
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                cancel.cancel("enough");
            });
            let job = torchrun(1, 2, "cancelled", more);
            let joined = job.join(&options, &RendezvousOptions::default());
            let error = joined.unwrap_err();
            assert!(
                matches!(&error, NetError::Aborted { by: 1, reason, .. } if reason == "enough"),
                "{error}"
            );
        });
        assert!(started.elapsed() < Duration::from_secs(15));
    }
}
