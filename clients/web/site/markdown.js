import{b as a}from"./chunk-F2NYVTKW.js";import"./chunk-L6PAJUAO.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
