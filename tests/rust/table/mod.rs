//! The table: what may enter it, who wins a race, how long it lasts; and the C functions of what is in it.

mod adoption;
mod c_functions;
mod registration;
