// The Python module _C: what was built, and which kernel serves which row. Free of torch headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "build_info.h"
#include "cuda/kernel_list.h"

namespace py = pybind11;

namespace sms {
namespace {

template <typename Value>
struct Named {
  const char* name;
  Value value;
};

constexpr Named<Direction> kDirections[] = {{"forward", Direction::forward}, {"backward", Direction::backward}};
constexpr Named<Element> kElements[] = {{"float16", Element::float16},
                                        {"bfloat16", Element::bfloat16},
                                        {"float32", Element::float32},
                                        {"float64", Element::float64}};
constexpr Named<MaskKind> kMaskKinds[] = {{"none", MaskKind::none},
                                          {"bool", MaskKind::boolean},
                                          {"same", MaskKind::same},
                                          {"float32", MaskKind::float32}};

template <typename Value, size_t count>
Value parse(const char* argument, const std::string& given, const Named<Value> (&table)[count]) {
  std::string expected;
  for (const Named<Value>& entry : table) {
    if (given == entry.name) return entry.value;
    expected += expected.empty() ? entry.name : std::string(", ") + entry.name;
  }
  throw std::invalid_argument(std::string(argument) + " is '" + given + "'; expected one of " + expected + ".");
}

template <typename Value, size_t count>
const char* name_of(Value value, const Named<Value> (&table)[count]) {
  for (const Named<Value>& entry : table) {
    if (entry.value == value) return entry.name;
  }
  throw std::logic_error("a value without a name");
}

py::dict build_info_dict() {
  const BuildInfo info = build_info();
  py::dict result;
  result["torch"] = info.torch;
  result["cuda"] = info.cuda == nullptr ? py::object(py::none()) : py::str(info.cuda);
  result["cuda_compiler"] = info.cuda_compiler == nullptr ? py::object(py::none()) : py::str(info.cuda_compiler);
  result["host_compiler"] = info.host_compiler;
  result["cxx11_abi"] = info.cxx11_abi;
  result["instruction_set"] = info.instruction_set;
  return result;
}

py::dict plan(const std::string& direction, int64_t columns, const std::string& dtype, const std::string& mask,
              bool band, int capability, bool dropout) {
  if (columns < 1) throw std::invalid_argument("columns is " + std::to_string(columns) + "; expected at least 1.");
  const cuda::Plan chosen =
      cuda::choose({parse("direction", direction, kDirections), columns, parse("dtype", dtype, kElements),
                    parse("mask", mask, kMaskKinds), band, capability, dropout});
  py::dict result;
  result["strategy"] = cuda::name(chosen.strategy);
  result["lanes"] = chosen.lanes;
  result["vectors"] = chosen.vectors;
  result["rows"] = chosen.rows;
  result["threads"] = chosen.threads;
  result["blocks"] = chosen.blocks;
  result["rows_per_block"] = chosen.rows_per_block();
  result["description"] = cuda::describe(chosen);
  return result;
}

py::list all_kernels() {
  py::list result;
  for (const cuda::Kernel& kernel : cuda::all_kernels()) {
    py::dict entry;
    entry["direction"] = name_of(kernel.direction, kDirections);
    entry["dtype"] = name_of(kernel.element, kElements);
    entry["mask"] = name_of(kernel.mask, kMaskKinds);
    entry["strategy"] = cuda::name(kernel.strategy);
    entry["lanes"] = kernel.lanes;
    entry["vectors"] = kernel.vectors;
    entry["rows"] = kernel.rows;
    entry["dropout"] = kernel.dropout;
    entry["symbol_prefix"] = kernel.symbol_prefix();
    result.append(entry);
  }
  return result;
}

}  // namespace
}  // namespace sms

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build facts and kernel policy of the native library.";
  module.def("build_info", &sms::build_info_dict, "What the library was built from, as a dict.");
  module.def("plan", &sms::plan, py::arg("direction"), py::arg("columns"), py::arg("dtype"), py::arg("mask") = "none",
             py::arg("band") = false, py::arg("capability") = 90, py::arg("dropout") = false,
             "The CUDA plan for rows of `columns` cells: direction 'forward' or 'backward'; dtype 'float16', "
             "'bfloat16', 'float32' or 'float64'; mask 'none', 'bool', 'same' or 'float32'; band: exclusions by "
             "position; capability 10 * major + minor; dropout: with dropout. How many rows a block holds may change "
             "where they are not whole vectors, or causal. Raises ValueError for other values.");
  module.def("all_kernels", &sms::all_kernels, "Every CUDA kernel that a plan can lead to, with its symbol's prefix.");
}
