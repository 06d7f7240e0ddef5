//! The module `ctxalloc._native`. The package `python/ctxalloc` exports what users see.
#![allow(unsafe_code, reason = "NumPy's default handler is adopted here")]

use super::asyncio;
use super::capi;
use super::errors;
use super::exchange;
use super::exit;
use super::foreign::keep;
use super::interpreter;
use super::numpy::{Numpy, struct_in};
use super::request;
use super::request::block as request_block;
use super::request::call as request_call;
use super::scope_type;
use super::settings;
use super::shared;
use super::step::Step;
use crate::handler::{Extras, Reach, adopt, handler};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// Takes NumPy's default handler into the table under its own name, and makes it the default of Rust contexts too.
///
/// NumPy's functions keep a cache that only the GIL protects. Rust code may not hold the GIL, so it uses what is
/// beneath that cache, the C heap. The two never mix: whichever made a block also frees it.
fn adopt_numpys_default(py: Python<'_>) -> PyResult<()> {
    let capsule = Numpy::get(py)?.default_capsule(py);
    let c_struct = struct_in(capsule)
        .ok_or_else(|| PyImportError::new_err("NumPy's default handler is not a capsule 'mem_handler'"))?;
    let system = handler("system").expect("built in");
    let extras = Extras { alignment: system.alignment(), ..Extras::default() };
    // SAFETY: NumPy's struct is static. Rust calls `system`'s functions in its place, from any thread, and has their
    // alignment.
    let default = unsafe { adopt(c_struct, Reach::By(system), None, extras) }?;
    keep(default, capsule.clone().unbind());
    shared::use_default(default);
    Ok(())
}

/// Makes the types that the module does not export. Else each would be made at its first use, where pyo3 lets other
/// threads run: a child of a fork in that moment would wait for ever for the thread that it does not have.
fn make_types(py: Python<'_>) {
    asyncio::make_types(py);
    exchange::make_types(py);
    request::make_types(py);
    py.get_type::<Step>();
}

#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::super::answer::answer;
    #[pymodule_export]
    use super::super::asyncgen::anext_unhooked;
    #[pymodule_export]
    use super::super::budget::PyBudget;
    #[pymodule_export]
    use super::super::cuda::{
        PyCapture, cuda_address, cuda_configure, cuda_device, cuda_info, cuda_keep, cuda_kind_of, cuda_load,
        cuda_register, cuda_settle, cuda_wait,
    };
    #[pymodule_export]
    use super::super::events::set_event_hook;
    #[pymodule_export]
    use super::super::exchange::{PyExchange, PyExchanges, PyRouteTable, is_trios};
    #[pymodule_export]
    use super::super::handler::PyHandler;
    #[pymodule_export]
    use super::super::inspect::{
        adopt, current, get_handler_name, get_handler_version, handler, handler_of, handlers, register,
        shared_memory_at,
    };
    #[pymodule_export]
    use super::super::metrics::{
        all_budgets, all_waits, is_ready, limits, metrics, pool_bytes, pool_resident, present_requests, resident_bytes,
        room_made,
    };
    #[pymodule_export]
    use super::super::profile::{profile_begin, profile_end};
    #[pymodule_export]
    use super::super::reclaimers::PyReclaimer;
    #[pymodule_export]
    use super::super::recording::{PyExport, PyInfo, PyRecorder, PyRecording, record, record_program, stop_recording};
    #[pymodule_export]
    use super::super::request::{
        PyEscaped, PyRequest, PyRequestMetrics, PyStats, PyWholeStats, current_request, escaped_of, note_ends, request,
        request_metrics, served_in, stats_of, whole_stats_of,
    };
    #[pymodule_export]
    use super::super::serving_step::ServingStep;
    #[pymodule_export]
    use super::super::settings::{configure, trim};
    #[pymodule_export]
    use super::super::sited::Sampler;
    #[pymodule_export]
    use super::super::strategies::PyStrategy;
    #[pymodule_export]
    use super::super::token::{PyToken, reset, set_handler};
    #[pymodule_export]
    use super::super::tracked::{PyBlock, report};
    #[pymodule_export]
    use super::super::tune::{planned, recorded_routes, replayed};
    #[pymodule_export]
    use super::super::usm::{DlpackOwner, PyMemory, PyQueue, PyView, usm_dlpack, usm_from_dlpack};
    #[pymodule_export]
    use super::super::whole::{enable, library, nobodys, nobodys_by_group};

    use super::{
        Numpy, adopt_numpys_default, capi, errors, exit, interpreter, make_types, request_block, request_call,
        scope_type, settings, shared,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        interpreter::require_main()?;
        make_types(py);
        errors::import(py)?;
        settings::begin()?;
        adopt_numpys_default(py)?;
        exit::close_at_exit(py)?;
        interpreter::announce(py)?;
        scope_type::add_to(module)?;
        request_call::add_to(module)?;
        request_block::add_to(py)?;
        module.add(shared::ATTRIBUTE, shared::table_capsule(py)?)?;
        module.add("_C_API", capi::api(py)?)?;
        module.add("tracemalloc_domain", interpreter::DOMAIN)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("selection", Numpy::get(py)?.selection().name())?;
        Ok(())
    }
}
