//! Asking for parameters.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::io::Write;

use super::{calls, exports, success, value};
use crate::params::{ALL, Parameter};
use crate::pointer::{Address, Out, RecvBuffer, Text};
use crate::status::{Error, Status};

thread_local! {
    /// What this thread was given last, by each of the two functions that give strings.
    static GIVEN: RefCell<[CString; 2]> = RefCell::default();
}

/// The names of all, as C has them.
struct Keys([*const c_char; ALL.len()]);

// SAFETY: addresses of constants, which nobody writes.
unsafe impl Sync for Keys {}

static KEYS: Keys = {
    let mut keys = [std::ptr::null(); ALL.len()];
    let mut index = 0;
    while index < keys.len() {
        keys[index] = ALL[index].key.as_ptr();
        index += 1;
    }
    Keys(keys)
};

fn give(slot: usize, text: CString) -> *const c_char {
    GIVEN.with_borrow_mut(|given| {
        given[slot] = text;
        given[slot].as_ptr()
    })
}

fn bound(handle: Address) -> Result<&'static Parameter, Error> {
    Parameter::numbered(handle.number())
}

fn key_of(key: Text) -> Result<(u64, &'static Parameter), Error> {
    let key = key.read().ok_or_else(|| Error::argument("key is NULL"))?;
    Parameter::find(&key)
}

fn integer<T: TryFrom<i128>>(handle: Address, out: &Out<T>) -> Result<Status, Error> {
    out.set("out", bound(handle)?.integer()?).map(success)
}

calls! {
    fn ncclParamBind(out: Out<Address>, key: Text) {
        out.check("out")?;
        out.set("out", Address::of(key_of(key)?.0)).map(success)
    }

    fn ncclParamGetI8(handle: Address, out: Out<i8>) { integer(handle, &out) }
    fn ncclParamGetI16(handle: Address, out: Out<i16>) { integer(handle, &out) }
    fn ncclParamGetI32(handle: Address, out: Out<i32>) { integer(handle, &out) }
    fn ncclParamGetI64(handle: Address, out: Out<i64>) { integer(handle, &out) }
    fn ncclParamGetU8(handle: Address, out: Out<u8>) { integer(handle, &out) }
    fn ncclParamGetU16(handle: Address, out: Out<u16>) { integer(handle, &out) }
    fn ncclParamGetU32(handle: Address, out: Out<u32>) { integer(handle, &out) }
    fn ncclParamGetU64(handle: Address, out: Out<u64>) { integer(handle, &out) }

    fn ncclParamGetStr(handle: Address, out: Out<*const c_char>) {
        out.check("out")?;
        out.set("out", give(0, bound(handle)?.text())).map(success)
    }

    /// Every parameter is text, without a zero at its end.
    fn ncclParamGet(handle: Address, out: RecvBuffer, most: i32, length: Out<i32>) {
        length.check("len")?;
        let text = bound(handle)?.text().into_bytes();
        let needed = i32::try_from(text.len()).unwrap_or(i32::MAX);
        length.set("len", needed)?;
        if needed > most {
            return Err(Error::argument(format!("maxLen is {most}, the value has {needed} bytes")));
        }
        let mut place = out.bytes("out", text.len())?;
        place.as_slice_mut().copy_from_slice(&text);
        Ok(Status::Success)
    }

    fn ncclParamGetParameter(key: Text, out: Out<*const c_char>, length: Out<i32>) {
        out.check("value")?;
        length.check("valueLen")?;
        let text = key_of(key)?.1.text();
        length.set("valueLen", i32::try_from(text.count_bytes()).unwrap_or(i32::MAX))?;
        out.set("value", give(1, text)).map(success)
    }

    fn ncclParamGetAllParameterKeys(table: Out<*const *const c_char>, length: Out<i32>) {
        table.check("table")?;
        length.set("tableLen", i32::try_from(ALL.len()).unwrap_or(i32::MAX))?;
        table.set("table", KEYS.0.as_ptr()).map(success)
    }
}

exports! {
    fn ncclParamDumpAll() -> () {
        value("ncclParamDumpAll", (), || {
            for parameter in ALL {
                let value = parameter.value();
                let value = value.as_deref().unwrap_or("<unset>");
                let (name, about) = (parameter.name(), parameter.about);
                let _ = writeln!(std::io::stderr(), "crossweft: {name}={value} ({about})");
            }
            Ok(())
        });
    }
}
