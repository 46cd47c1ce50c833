//! The network.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use super::page::{Page, list};
use super::root::Root;

#[derive(Debug, Serialize)]
pub(super) struct Network {
    pub(super) loopback: bool,
    pub(super) interfaces: Vec<Interface>,
    pub(super) rdma_devices: BTreeSet<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) state: Option<String>,
    /// Megabits a second.
    pub(super) speed: Option<u64>,
    pub(super) mtu: Option<u64>,
}

impl Network {
    pub(super) fn inspect(root: &Root<'_>) -> Self {
        let net = Path::new("/sys/class/net");
        let mut names = root.names(net);
        // A file there configures bonding; only directories are interfaces.
        names.retain(|name| root.path(net.join(name)).is_dir());
        let up =
            |name: &str| root.value(net.join(name).join("operstate")).as_deref() != Some("down");
        let loopback = names.remove("lo") && up("lo");
        let interface = |name: String| Interface {
            state: root.value(net.join(&name).join("operstate")),
            // The kernel reports -1, or 2^32 - 1, for links of no speed.
            speed: root
                .number(net.join(&name).join("speed"))
                .filter(|&speed| speed > 0 && speed < u64::from(u32::MAX)),
            mtu: root.number(net.join(&name).join("mtu")),
            name,
        };
        Self {
            loopback,
            interfaces: names.into_iter().map(interface).collect(),
            rdma_devices: root.names("/sys/class/infiniband"),
        }
    }

    /// Its section of the report.
    pub(super) fn render(&self, page: &mut Page) {
        page.section("Network");
        page.row(
            "loopback",
            if self.loopback {
                "up"
            } else {
                "not found or down"
            },
        );
        for interface in &self.interfaces {
            page.row(&interface.name, &describe(interface));
        }
        if self.interfaces.is_empty() {
            page.row("interfaces", "not found");
        }
        page.row(
            "RDMA",
            &list(self.rdma_devices.iter().cloned(), "not found"),
        );
    }
}

fn describe(interface: &Interface) -> String {
    let speed = match interface.speed {
        Some(speed) if speed >= 1000 => format!("{} Gbit/s", speed as f64 / 1000.0),
        Some(speed) => format!("{speed} Mbit/s"),
        None => "speed not known".to_owned(),
    };
    let state = interface.state.as_deref().unwrap_or("state not known");
    let mtu = interface
        .mtu
        .map_or("not known".to_owned(), |mtu| mtu.to_string());
    format!("{state}, {speed}, mtu {mtu}")
}
