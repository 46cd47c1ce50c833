//! Memory, and registering it.

use std::sync::Arc;

use crossweft_hal::Memory;

use super::{asking, calls, grouped, on, success};
use crate::devices::Place;
use crate::pointer::{Address, Out};
use crate::status::Error;
use crate::window::Window;
use crate::{group, settings, table};

calls! {
    /// Zeroed memory that other ranks can reach once it is a window, and the process's other devices at once: programs that drive
    /// several copy it while another is current.
    fn ncclMemAlloc(place: Out<Address>, bytes: usize) {
        place.check("ptr")?;
        let device = Place::current()?.device;
        if bytes == 0 {
            return place.set("ptr", Address::of(0)).map(success);
        }
        let memory = device.allocate(bytes as u64)?;
        // It is of use without, too.
        if let Memory::Cuda(memory) = &memory && let Err(error) = memory.allow_all() {
            settings::inform(|| format!("memory of ncclMemAlloc is for its own GPU alone: {error}"));
        }
        place.set("ptr", table::keep(memory)).map(success)
    }

    fn ncclMemFree(address: Address) {
        if address != Address::of(0) {
            table::free(address)?;
        }
        Ok(success(()))
    }

    /// Local. Buffers anywhere work as well, so a registered one is only remembered.
    fn ncclCommRegister(comm: Address, buffer: Address, bytes: usize, handle: Out<Address>) {
        on(comm, |comm| {
            handle.check("handle")?;
            comm.usable()?;
            if buffer == Address::of(0) || bytes == 0 {
                return Err(Error::argument("the buffer is empty"));
            }
            handle.set("handle", comm.remember_buffer())
        })
        .map(success)
    }

    fn ncclCommDeregister(comm: Address, handle: Address) {
        on(comm, |comm| comm.forget_buffer(handle)).map(success)
    }

    fn ncclCommWindowRegister(
        comm: Address, buffer: Address, bytes: usize, place: Out<Address>, flags: i32,
    ) {
        grouped(|| on(comm, |comm| {
            let window = asking(comm, || {
                place.check("win")?;
                comm.usable()?;
                Window::new(buffer.number(), bytes as u64, flags)
            })?;
            let handle = table::insert_window(comm, &window);
            place.set("win", handle)?;
            let own = Arc::clone(comm);
            group::manage(comm, None, move || {
                let registered = own.registering(|| window.register(&own));
                registered.inspect_err(|_| table::remove_window(&own, handle))
            })
            .inspect_err(|_| drop(place.set("win", Address::of(0))))
        }))
    }

    fn ncclCommWindowDeregister(comm: Address, window: Address) {
        on(comm, |comm| {
            let forgotten = table::window_of(comm, window)?;
            table::remove_window(comm, window);
            comm.with_engine(|engine| engine.forget(&forgotten))?
        })
        .map(success)
    }

    fn ncclWinGetUserPtr(comm: Address, window: Address, place: Out<Address>) {
        on(comm, |comm| {
            let window = table::window_of(comm, window)?;
            place.set("outUserPtr", Address::of(window.address()))
        })
        .map(success)
    }
}
