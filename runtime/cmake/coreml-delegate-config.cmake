# CMake package of the backend that runs Core ML delegates without Python; docs/native.md describes it.
#
#   find_package(coreml-delegate REQUIRED)
#   target_link_libraries(my_app PRIVATE coreml_delegate::backend)
#
# The target is compiled with the application, because it depends on the class layouts of the
# ExecuTorch at hand, and links ExecuTorch with its CPU kernels, and OpenVINO's C library.

cmake_minimum_required(VERSION 3.19)

if(TARGET coreml_delegate::backend)
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(executorch)

get_filename_component(_coreml_delegate_runtime "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

# OpenVINO's wheel has the C library with its version number only, and headers.
find_path(COREML_DELEGATE_OPENVINO_HEADERS openvino/c/openvino.h PATH_SUFFIXES include)
get_filename_component(_coreml_delegate_openvino "${COREML_DELEGATE_OPENVINO_HEADERS}/.." ABSOLUTE)
file(GLOB COREML_DELEGATE_OPENVINO_LIBRARY "${_coreml_delegate_openvino}/libs/libopenvino_c.so*")
list(LENGTH COREML_DELEGATE_OPENVINO_LIBRARY _coreml_delegate_found)
if(NOT _coreml_delegate_found EQUAL 1)
  set(coreml-delegate_FOUND FALSE)
  set(coreml-delegate_NOT_FOUND_MESSAGE
      "OpenVINO's Python package is not in CMAKE_PREFIX_PATH; coreml_delegate.runtime.cmake_prefix_path() gives it")
  return()
endif()

# An object library: a linker would drop a static one, which nothing refers to.
add_library(
  coreml_delegate_backend OBJECT
  "${_coreml_delegate_runtime}/program/native_backend.cpp"
  "${_coreml_delegate_runtime}/engines/openvino/session/native_calls.cpp")
add_library(coreml_delegate::backend ALIAS coreml_delegate_backend)
target_compile_features(coreml_delegate_backend PUBLIC cxx_std_17)
target_compile_definitions(coreml_delegate_backend PUBLIC ${EXECUTORCH_COMPILE_DEFINITIONS})
target_include_directories(coreml_delegate_backend SYSTEM PUBLIC ${EXECUTORCH_INCLUDE_DIRS})
target_include_directories(
  coreml_delegate_backend
  PRIVATE "${_coreml_delegate_runtime}" "${_coreml_delegate_runtime}/program"
          "${COREML_DELEGATE_OPENVINO_HEADERS}")
target_link_libraries(
  coreml_delegate_backend PUBLIC ${EXECUTORCH_LIBRARIES} "${COREML_DELEGATE_OPENVINO_LIBRARY}")
# OpenVINO's libraries find each other there.
target_link_options(
  coreml_delegate_backend INTERFACE "LINKER:-rpath,${_coreml_delegate_openvino}/libs")
