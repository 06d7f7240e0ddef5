//! Which object file an address is in. Whoever opens a library holds the loader's lock while that begins, and may wait
//! for a thread that asks for memory: so the loader is asked without its lock, where glibc can (2.35).

use crate::sync::Made;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

/// An object file of the process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loaded {
    /// Where it begins.
    pub(super) file: usize,
    name: *const c_char,
}

impl Loaded {
    /// Its path, as the loader knows it.
    pub(super) fn path(&self) -> &[u8] {
        self.name().to_bytes()
    }

    pub(super) fn name(&self) -> &CStr {
        // SAFETY: the loader gave it, for a file that is loaded, since a thread runs in it; it ends with NUL.
        unsafe { CStr::from_ptr(self.name) }
    }
}

/// The beginning of glibc's `struct dl_find_object`, with room for all of it.
#[repr(C)]
struct Object {
    flags: u64,
    start: *mut c_void,
    end: *mut c_void,
    map: *const LinkMap,
    rest: [usize; 12],
}

/// The beginning of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
}

type Find = unsafe extern "C" fn(*mut c_void, *mut Object) -> c_int;

static FIND: Made<Option<Find>> = Made::new();

/// Looks whether glibc can. Before any thread may ask while a library is opened.
pub(super) fn begin() {
    FIND.get_or_make(|| {
        // SAFETY: the name ends with NUL; `int _dl_find_object(void *, struct dl_find_object *)` since glibc 2.35.
        unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr());
            (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, Find>(found))
        }
    });
}

unsafe extern "C" {
    /// glibc's: the name that the process was started with. The loader has none for the program itself.
    static program_invocation_name: *const c_char;
}

/// The object file with this address.
pub(super) fn loaded(address: usize) -> Option<Loaded> {
    let Some(find) = FIND.get().copied().flatten() else { return by_dladdr(address) };
    let mut object = Object { flags: 0, start: null_mut(), end: null_mut(), map: std::ptr::null(), rest: [0; 12] };
    // SAFETY: any address may be asked for, with a place for the answer; the map of a loaded file has its name.
    unsafe {
        if find(std::ptr::without_provenance_mut(address), &raw mut object) != 0 || object.map.is_null() {
            return None;
        }
        let name = (*object.map).name;
        let is_program = name.is_null() || *name == 0;
        let name = if is_program { program_invocation_name } else { name };
        (!name.is_null()).then_some(Loaded { file: object.start.addr(), name })
    }
}

fn by_dladdr(address: usize) -> Option<Loaded> {
    let info = symbol_at(address)?;
    (!info.dli_fname.is_null()).then_some(Loaded { file: info.dli_fbase.addr(), name: info.dli_fname })
}

pub(super) fn empty() -> libc::Dl_info {
    libc::Dl_info { dli_fname: null_mut(), dli_fbase: null_mut(), dli_sname: null_mut(), dli_saddr: null_mut() }
}

/// What the loader knows of this address, with the function that it is in. It takes the loader's lock.
fn symbol_at(address: usize) -> Option<libc::Dl_info> {
    let mut info = empty();
    // SAFETY: any address may be asked for; a place for the answer.
    let is_known = unsafe { libc::dladdr(std::ptr::without_provenance(address), &raw mut info) } != 0;
    is_known.then_some(info)
}

/// Whether the function with this address, if others may call it, is one by its name. It takes the loader's lock.
pub(super) fn has_function(address: usize, is_it: impl FnOnce(&[u8]) -> bool) -> bool {
    let Some(info) = symbol_at(address).filter(|info| !info.dli_sname.is_null()) else { return false };
    // SAFETY: a name in the table of a loaded library, which ends with NUL.
    is_it(unsafe { CStr::from_ptr(info.dli_sname) }.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::{begin, by_dladdr, has_function, loaded};

    #[test]
    fn it_finds_without_a_lock_what_dladdr_finds() {
        begin();
        for address in
            [libc::malloc as *const () as usize, loaded as *const () as usize, libc::dlsym as *const () as usize]
        {
            let (found, known) = (loaded(address).expect("a file"), by_dladdr(address).expect("a file"));
            assert_eq!((found.file, found.path()), (known.file, known.path()));
        }
        assert!(loaded(8).is_none() && by_dladdr(8).is_none());
        assert!(has_function(libc::malloc as *const () as usize, |name| name.ends_with(b"malloc")));
    }
}
